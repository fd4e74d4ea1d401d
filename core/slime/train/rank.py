"""One training rank: everything the trainer does, behind one class."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from slime.engine.control import EngineControl
from slime.engine.keys import EngineKeys
from slime.errors import ConfigError, TrainerError
from slime.kit.processes.pulse import PULSE
from slime.plugin import Estimator, EstimatorSpec
from slime.plugin.architecture import Architecture
from slime.rollout.train_batch import loss_weights
from slime.train import parallel
from slime.train.advantages import (
    advantage_metrics,
    check_agreement,
    check_finite,
    check_tokens,
    estimate,
    required,
    whiten,
)
from slime.train.checkpoint_io import Write, write_now
from slime.train.chunks import build_chunks
from slime.train.critic import Critic
from slime.train.lora import (
    add_adapters,
    check_adapters,
    describe_adapters,
    merged_values,
    named_adapters,
    start_adapters,
)
from slime.train.loss import LossColumns, LossTerms, kl_per_token, micro_batch_loss, token_means
from slime.train.model import TrainableModel, timed
from slime.train.model_config import ModelShape, read_same_model
from slime.train.offload import Part, held_bytes
from slime.train.output_layer import PolicyModel, policy_head
from slime.train.predicting import LOSS_SCALE, PredictingModel, predicting_head, with_predicting_loss
from slime.train.reference import REFERENCE_PART, ReferenceWeights
from slime.train.schedule import LossFunction
from slime.train.settings import train_settings
from slime.train.token_record import TokenRecord
from slime.weights import Models, create_transport, drain, load_hf, named_hf_tensors, save_hf
from slime.weights.lora import lora_of, peft_config
from slime.weights.peft import peft_writer
from slime.weights.shards import NamedTensors, drained

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.observe.logged_tokens import LoggedTokens
    from slime.rollout.train_batch import Ragged, TrainBatch
    from slime.weights.transports.transport import WeightTransport


class MegatronRank:
    """One rank of the trainer. Every method is collective: all ranks call it, with the same arguments.

    After an error on any rank, `close(failed=True)` is all that may still be called.

    Attributes:
        config: The run's configuration.
        spec: What the estimator declares.
        policy: The model that is trained, with its optimizer and schedule.
        reference: The reference policy, if the run needs one.
        critic: The critic, if the estimator needs one.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        rank: int,
        world_size: int,
        meeting: parallel.MeetingPoint,
        estimator: Estimator | None,
        spec: EstimatorSpec | None = None,
        models: Models | None = None,
        run_dir: Path | None = None,
    ) -> None:
        """Join the other ranks and build model, reference, optimizer and critic.

        Args:
            config: The run's configuration.
            rank: Number of this rank.
            world_size: Number of ranks.
            meeting: Where the ranks find each other.
            estimator: Turns rewards into advantages; None for supervised fine-tuning.
            spec: What the estimator declares: what it needs, and the level of its ratio.
            models: Reads model folders; default: with the model families of the installed plugins.
            run_dir: The run's folder, through which weights may go to the engines; only `sync_weights` needs it.
        """
        self.config, self.spec = config, spec
        self._rank, self._run_dir = rank, run_dir
        self._supervised = config.algorithm.loss_type == "sft_loss"
        if not self._supervised and estimator is None:
            raise ConfigError("loss_type policy_loss needs an advantage estimator (--advantage-estimator).")
        self._estimator = None if self._supervised else estimator
        folder = config.checkpoint.hf_checkpoint
        self._models = models or Models.installed(config)
        self._architecture = None if folder is None else self._models.read(Path(folder))
        found = self._architecture
        if found is None and (config.lora.lora_rank is not None or config.lora.lora_load is not None):
            raise ConfigError(
                "adapters (--lora-rank, --lora-load) need --hf-checkpoint, which names the model's modules."
            )
        self._lora = None if found is None else lora_of(config.lora, found)
        #: the model as it is trained; the engines, the reference and the critic have `_architecture`
        self._trained = None if found is None else self._models.as_trained(found)
        shape = None if found is None else ModelShape(found.transformer, found.gpt)
        self._settings = train_settings(
            config,
            shape,
            post_norms=found is not None and found.post_norms,
            layer_specs=None if folder is None else self._models.layer_specs(Path(folder)),
        )
        self._transport: WeightTransport | None = None
        #: the engines that it sends to, and how often some were started again
        self._connected: tuple[tuple[str, ...], int] = (), 0
        self._rollouts_seen = 0
        #: what the last `train` computed of the tokens that are logged
        self._logged: LoggedTokens | None = None
        self._device = parallel.start(
            config, self._settings.transformer, rank=rank, world_size=world_size, meeting=meeting
        )
        try:
            self._build(frozenset() if spec is None else spec.needs)
        except BaseException:
            self.close(failed=True)  # so that the process ends with this error
            raise

    def _build(self, needs: frozenset[str]) -> None:
        config, settings, algorithm = self.config, self._settings, self.config.algorithm
        trained = self._trained
        further = trained.predicting if trained is not None and trained.predicts else None
        builder = PolicyModel if further is None else partial(PredictingModel, predicting=further.count)
        chunks = build_chunks(settings, self._device, builder)
        if self._lora is not None and self._architecture is not None:
            add_adapters(chunks, self._lora, self._architecture)
        self._estimator_needs_kl = not self._supervised and (algorithm.kl_coef != 0 or "reference" in needs)
        reference = self._estimator_needs_kl or (not self._supervised and algorithm.use_kl_loss)
        self.reference: ReferenceWeights | None = None
        if reference and config.checkpoint.ref_load is not None:
            folder = Path(config.checkpoint.ref_load)
            load_hf(chunks, folder, read_same_model(folder, self._models, self._architecture, "--ref-load"))
            self.reference = ReferenceWeights(chunks, shares_frozen=False)
        if config.checkpoint.hf_checkpoint is not None:
            load_hf(chunks, Path(config.checkpoint.hf_checkpoint), self._named())
        if self._lora is not None and self._architecture is not None:
            values = None if config.lora.lora_load is None else Path(config.lora.lora_load)
            start_adapters(chunks, self._lora, self._architecture, folder=values, seed=config.run.seed)
        if reference and self.reference is None:
            self.reference = ReferenceWeights(chunks)
        # Supervised answers were not sampled: their loss is the plain log-probability.
        temperature = 1.0 if self._supervised else config.rollout.rollout_temperature
        head = policy_head(chunks[-1], settings, temperature=temperature)
        if further is not None:
            head = predicting_head(head, chunks[-1], settings)
        self.policy = TrainableModel(
            config,
            settings,
            chunks,
            head,
            self._device,
            idle_rollouts=algorithm.num_critic_only_steps if "critic" in needs else 0,
        )
        self.critic: Critic | None = None
        if "critic" in needs:
            self.critic = Critic(
                config,
                settings,
                policy=chunks,
                models=self._models,
                architecture=self._architecture,
                device=self._device,
            )

    # --- training -----------------------------------------------------------------------------------

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """All optimizer steps of one rollout.

        A step without a single trained token changes nothing, neither weights nor the optimizer's moments; only
        the schedule counts it (`skipped_steps`). The critic, if there is one, is trained first; in the first
        `--num-critic-only-steps` rollouts only the critic is trained, and the policy's metrics are absent.

        Returns:
            Metrics, the same on every rank except for times. Per-token metrics are means over the trained tokens of
            the batch, `loss` and `grad_norm` means over its steps, `time/...` seconds of this rank's phases.

        Raises:
            TrainerError: The model does not know a token, or the loss or the gradient is not finite.
            PluginContractError: The estimator broke its contract.
        """
        if not len(batch.tokens):
            raise TrainerError(f"rollout {batch.rollout} has no trainable sample: there is nothing to train on.")
        check_tokens(batch, self._settings.vocab_size)
        algorithm = self.config.algorithm
        seconds: dict[str, float] = {}
        steps, skipped = _steps_of(batch)
        metrics: dict[str, float] = {"skipped_steps": len(skipped)} if skipped else {}
        critic_only = self.critic is not None and batch.rollout < algorithm.num_critic_only_steps
        policy_steps = [] if critic_only else steps
        columns, batch_metrics = self._columns(batch, seconds, steps=len(policy_steps))
        if self.config.run.log_token_columns != "none":
            columns = dataclasses.replace(columns, record=TokenRecord())
        metrics |= batch_metrics
        if self.critic is not None:
            if columns.returns is not None:
                metrics |= self.critic.train(batch, steps, columns, seconds)
            self.critic.model.skip(len(skipped))
        if not critic_only:
            loss: LossFunction = partial(micro_batch_loss, LossTerms.of(algorithm, self._estimator, self.spec), columns)
            if self._trained is not None and self._trained.predicts:
                scale = self.config.megatron.get("mtp_loss_scaling_factor", LOSS_SCALE)
                loss = with_predicting_loss(loss, columns, scale)
            sums, grad_norm, lr = self.policy.train(batch, policy_steps, loss, seconds)
            self.policy.skip(len(skipped))
            metrics |= self.policy.routing_metrics(steps=len(policy_steps))
            metrics |= token_means(sums, steps=max(1, len(steps))) | {"grad_norm": grad_norm, "lr": lr}
        self._logged = self._log(batch, columns)
        self._rollouts_seen += 1
        every = algorithm.ref_update_interval
        if self.reference is not None and every is not None and (batch.rollout + 1) % every == 0:
            self.policy.finish_param_gather()
            self.reference.renew()
        return metrics | seconds

    def _log(self, batch: TrainBatch, columns: LossColumns) -> LoggedTokens | None:
        if columns.record is None:
            return None
        everywhere = {
            "advantage": columns.advantages,
            "ref_logprob": columns.ref_log_probs,
            "value": columns.values,
            "returns": columns.returns,
        }
        return columns.record.collect(batch, everywhere, columns.mask, self.config.run)

    def logged_tokens(self) -> LoggedTokens | None:
        """What the last `train` computed of the tokens that are logged, on rank 0; None if nothing is."""
        logged, self._logged = self._logged, None
        return logged if self._rank == 0 else None

    def log_probs(self, batch: TrainBatch) -> Ragged[np.float32]:
        """Log-probs of the response tokens under the current weights, at the rollout temperature: N x [T_i] float32.

        Also of those that are not trained on.
        """
        every = batch.loss_masks.like(np.ones_like(batch.loss_masks.flat))
        return every.like(self.policy.score(dataclasses.replace(batch, loss_masks=every)).numpy())

    def _columns(
        self, batch: TrainBatch, seconds: dict[str, float], *, steps: int
    ) -> tuple[LossColumns, dict[str, float]]:
        """Per-token data that must be known before the first of the policy's `steps`, and metrics of the advantages."""

        def on_device(column: Tensor | None) -> Tensor | None:
            return None if column is None else column.to(self._device)

        algorithm = self.config.algorithm
        weights = loss_weights(
            batch, per_token=algorithm.calculate_per_token_loss, constant_length=algorithm.loss_constant_length
        )
        mask = torch.tensor(batch.loss_masks.flat)
        columns = LossColumns(torch.tensor(weights.flat, device=self._device), mask.to(self._device))
        if self._estimator is None or not mask.any():
            return columns, {}
        check_finite(batch)
        ref = old = kl = values = None
        by_engine = bool(algorithm.use_rollout_logprobs)
        # In a single step the policy does not move before its tokens are used: the training pass gives old log-probs.
        if (steps > 1 and not by_engine) or self._estimator_needs_kl or algorithm.true_on_policy_mode:
            with timed(seconds, "time/old_log_probs"):
                old = self.policy.score(batch)
        if algorithm.true_on_policy_mode and old is not None:
            check_agreement(batch, old, algorithm.true_on_policy_tolerance)
        if self.reference is not None and (steps or self._estimator_needs_kl):
            self.policy.finish_param_gather()  # else weights still being gathered would be exchanged
            with timed(seconds, "time/ref_log_probs"), self.reference.in_model():
                # The engine's choice of experts is the policy's; another model has its own.
                ref = self.policy.score(batch, replay=False)
        if self.critic is not None:
            with timed(seconds, "time/values"):
                values = self.critic.values(batch)
        with timed(seconds, "time/advantages"):
            if self._estimator_needs_kl and ref is not None and old is not None:
                kl = kl_per_token(old, ref, algorithm.kl_reward_type)
            passive = self._rollouts_seen < self.config.rollout.passive_checks
            with PULSE.inside(f"estimator {self.config.algorithm.advantage_estimator}"):
                needs = () if self.spec is None else self.spec.columns
                estimated = estimate(self._estimator, batch, kl, values, needs=needs, passive=passive)
            advantages = torch.cat(estimated.advantages)
            if algorithm.normalize_advantages:
                advantages = whiten(advantages, mask)
        if by_engine:
            old = required(
                batch,
                "--use-rollout-logprobs (the default with --async, filters and over-sampling; --no-use-rollout-logprobs"
                " turns it off)",
            )
        if algorithm.off_policy_correction is not None:
            required(batch, "--off-policy-correction (or --use-tis)")
        if algorithm.off_policy_sequence_delta is not None:
            required(batch, "--off-policy-sequence-delta")
        engine = None if batch.rollout_log_probs is None else torch.tensor(batch.rollout_log_probs.flat)
        columns = dataclasses.replace(
            columns,
            advantages=on_device(advantages),
            old_log_probs=on_device(old),
            old_by_engine=by_engine,
            ref_log_probs=on_device(ref),
            rollout_log_probs=on_device(engine),
            values=on_device(values),
            returns=None if values is None or estimated.returns is None else on_device(torch.cat(estimated.returns)),
        )
        return columns, advantage_metrics(advantages, mask)

    # --- weights and state --------------------------------------------------------------------------

    def named_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The full weights under their Hugging Face names, on rank 0; the other ranks must iterate too and get none.

        Raises:
            ConfigError: The run has no Hugging Face folder, which defines the names.
        """
        return self._weights_of(self._named())

    def _weights_of(self, model: Architecture) -> NamedTensors:
        self.policy.finish_param_gather()
        values_of = None if self._lora is None else merged_values(self.policy.chunks)
        return named_hf_tensors(self.policy.chunks, model, values_of=values_of)

    def _named(self) -> Architecture:
        """The model that is trained, with its Hugging Face names."""
        if self._trained is None:
            raise ConfigError(
                "without --hf-checkpoint the weights have no Hugging Face names; give the model's folder."
            )
        return self._trained

    def named_adapters(self) -> NamedTensors:
        """The full tensors of the adapters, if there are any, under PEFT's names; otherwise as `named_hf_weights`."""
        if self._lora is None or self._architecture is None:
            return iter(())
        self.policy.finish_param_gather()
        return named_adapters(self.policy.chunks, self._lora, self._architecture)

    def sync_weights(
        self, engine_urls: list[str], keys: EngineKeys | None, tp_size: int, version: str, restarts: int = 0
    ) -> int:
        """Bring the engines to the policy's weights: every rank gathers, rank 0 sends.

        Layers for multi-token prediction are not sent: the engines' model has no place for them.

        Args:
            engine_urls: One URL for each engine.
            keys: Keys of the engines; None if they have none.
            tp_size: Tensor-parallel size of an engine.
            version: Name of these weights, which the engines report with every token from now on.
            restarts: How often engines have been started again, each of which is to be connected to anew.

        Returns:
            Bytes that were sent to each engine, on rank 0; 0 on the others.
        """
        model = self._architecture
        assert model is not None
        weights = self._weights_of(model)
        if self._rank != 0:
            drain(weights)
            return 0
        connected = tuple(engine_urls), restarts
        if self._transport is None or connected != self._connected:
            ep_size = self.config.sglang.get("ep_size", 1)
            engines = [EngineControl(url, keys, tp_size=tp_size, ep_size=ep_size) for url in engine_urls]
            if self._transport is None:
                assert self._run_dir is not None
                self._transport = create_transport(
                    self.config.sync,
                    engines,
                    model=model,
                    hf_folder=Path(str(self.config.checkpoint.hf_checkpoint)),
                    scratch=self._run_dir / "weights",
                    on_gpu=self.config.on_gpu,
                    repeated=self.config.restarts_engines,
                )
            else:
                self._transport.connect(engines)
            self._connected = connected
        sent = 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal sent
            for name, tensor in weights:
                sent += tensor.nbytes
                yield name, tensor

        self._transport.send(counted(), version=version)
        return sent

    def release_memory(self, parts: Sequence[Part]) -> None:
        """Let the engines have the memory of "training", and then that of the "weights": see `slime.train.offload`.

        Nothing may be called that needs it until it is restored; after "training", the weights can still be sent. The
        critic with its weights belongs to "training". The reference is in host memory all the time.
        """
        for part in parts:
            self.policy.release_memory(part)
            if part == "training" and self.critic is not None:
                self.critic.model.release_memory("training")
                self.critic.model.release_memory("weights")

    def restore_memory(self, parts: Sequence[Part]) -> None:
        """Bring back what `release_memory` released, the "weights" first."""
        for part in parts:
            self.policy.memory.restore(part)
            if part == "training" and self.critic is not None:
                self.critic.model.memory.restore("weights")
                self.critic.model.memory.restore("training")

    def held_bytes(self) -> int:
        """Bytes in use of this rank's GPU, by all processes together; on a CPU, by this process."""
        return held_bytes(self._device)

    def export_hf(self, folder: Path) -> None:
        """Write a complete Hugging Face model folder, with adapters merged and in a folder `adapter`; rank 0 writes."""
        weights, base = self.named_hf_weights(), Path(str(self.config.checkpoint.hf_checkpoint))
        adapters, also = self.named_adapters(), None
        if self._lora is not None and self._architecture is not None:
            also = peft_writer(adapters, peft_config(self._lora, self._architecture, str(base)))
        if self._rank == 0:
            with drained(adapters):
                save_hf(folder, weights, base, self._named(), also=also)
        else:
            drain(weights)
            drain(adapters)

    def save(self, folder: Path, write: Write = write_now) -> None:
        """Write weights, optimizer, schedule and random states to `folder`, which must be new or empty.

        Args:
            folder: The trainer's part of a checkpoint.
            write: Writes a folder: at once, or a `BackgroundWrite`.
        """
        self.policy.save(folder, write)
        if self.critic is not None:
            self.critic.save(folder, write)
        if self.reference is not None:
            self.reference.save(folder / REFERENCE_PART, write)
        if self._lora is not None and self._rank == 0:
            describe_adapters(folder, self._lora, Path(str(self.config.checkpoint.hf_checkpoint)))

    def load(self, folder: Path, weights_only: bool = False) -> None:
        """Read what `save` wrote, under any parallel layout.

        Args:
            folder: The trainer's part of a checkpoint.
            weights_only: Start a new run from these weights: the optimizer is fresh, and they become the reference
                unless --ref-load names one.
        """
        self.policy.finish_param_gather()
        base = self.config.checkpoint.hf_checkpoint
        check_adapters(folder, self._lora, None if base is None else Path(base))
        self.policy.check(folder, weights_only=weights_only)
        if self.critic is not None and not weights_only:
            self.critic.check(folder)
        if self.reference is not None and not weights_only:
            self.reference.load(folder / REFERENCE_PART)
        self.policy.load(folder, weights_only=weights_only)
        if weights_only and self.reference is not None and self.config.checkpoint.ref_load is None:
            self.reference.renew()
        if self.critic is not None:
            self.critic.load(folder, weights_only=weights_only)

    def close(self, *, failed: bool = False) -> None:
        """Leave the process groups; nothing may be called afterwards. After an error pass `failed=True`."""
        try:
            if self._transport is not None:
                self._transport.close()
        finally:
            parallel.stop(failed=failed)


def _steps_of(batch: TrainBatch) -> tuple[list[int], list[int]]:
    """The optimizer steps that train any token, and those that train none, in order."""
    trained = np.repeat(batch.step_ids, batch.response_lengths)[batch.loss_masks.flat != 0]
    with_tokens = set(np.unique(trained).tolist())
    steps = np.unique(batch.step_ids).tolist()
    return [step for step in steps if step in with_tokens], [step for step in steps if step not in with_tokens]
