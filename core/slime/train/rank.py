"""One training rank: everything the trainer does, behind one class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from slime.engine.control import EngineKeys
from slime.errors import ConfigError
from slime.plugin import Estimator, EstimatorSpec
from slime.plugin.architecture import Architecture
from slime.train import parallel
from slime.train.checkpoint_io import Write, write_now
from slime.train.chunks import build_chunks
from slime.train.critic import Critic
from slime.train.features import Feature
from slime.train.lora import AdapterTraining, merged_values, refuse_adapters
from slime.train.model import TrainableModel
from slime.train.offload import Part, held_bytes
from slime.train.output_layer import PolicyModel, policy_head
from slime.train.predicting import LOSS_SCALE, FurtherLayers, refuse_layers
from slime.train.rank_profiles import RankProfiles
from slime.train.reference import REFERENCE_PART, ReferenceWeights
from slime.train.settings import train_settings
from slime.train.step import Learner, kl_in_reward
from slime.weights.hf_load import load_hf
from slime.weights.hf_save import save_hf
from slime.weights.models import Models
from slime.weights.quantised import quantisation_of
from slime.weights.shards import NamedTensors, drain, drained, is_first_of_stage, named_hf_tensors
from slime.weights.transports import WeightSender
from slime.weights.transports.delta import Receive

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.observe.logged_tokens import LoggedTokens
    from slime.rollout.train_batch import Ragged, TrainBatch


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
            run_dir: The run's folder, through which weights may go to the engines, and which gets profiles; None for
                neither.
        """
        self.config, self.spec = config, spec
        self._rank = rank
        self._supervised = not config.trains_policy
        if not self._supervised and estimator is None:
            raise ConfigError("loss_type policy_loss needs an advantage estimator (--advantage-estimator).")
        self._estimator = None if self._supervised else estimator
        folder = config.checkpoint.hf_checkpoint
        self._models = models or Models.installed(config)
        self._architecture = None if folder is None else self._models.read(Path(folder))
        found = self._architecture
        self.adapters = AdapterTraining(config, found) if config.lora.asked else None
        #: the model as it is trained; the reference and the critic have `_architecture`
        self._trained = None if found is None else self._models.as_trained(found)
        #: what is sent to the engines
        self._synced = self._trained if config.sends_drafts else found
        layer_specs = None if folder is None else self._models.layer_specs(Path(folder))
        self._settings = train_settings(config, found, layer_specs)
        self._quantised = None if found is None else quantisation_of(config.sync, found)
        self._sender = None if self._synced is None else WeightSender(config, self._synced, run_dir)
        self._profiles = RankProfiles(config, run_dir, rank) if config.run.is_profiled else None
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
        features: list[Feature] = [] if self.adapters is None else [self.adapters]
        model: Callable[..., PolicyModel] = PolicyModel
        if self._trained is not None and self._trained.predicts:
            assert self._trained.predicting is not None
            scale = config.megatron.get("mtp_loss_scaling_factor", LOSS_SCALE)
            predicting = FurtherLayers(self._trained.predicting.count, scale=scale, vocab_size=settings.vocab_size)
            features.append(predicting)
            model = predicting.model
        if settings.fused is not None:
            model = partial(model, softmax=settings.fused.softmax)
        chunks = build_chunks(settings, self._device, model)
        for feature in features:
            feature.build(chunks)
        reference = not self._supervised and (kl_in_reward(algorithm, self.spec) or algorithm.use_kl_loss)
        self.reference: ReferenceWeights | None = None
        if reference and config.checkpoint.ref_load is not None:
            folder = Path(config.checkpoint.ref_load)
            load_hf(chunks, folder, self._models.read_same(folder, self._architecture, "--ref-load"))
            self.reference = ReferenceWeights(chunks, shares_frozen=False)
        if config.checkpoint.hf_checkpoint is not None:
            load_hf(chunks, Path(config.checkpoint.hf_checkpoint), self._named())
        for feature in features:
            feature.start(chunks)
        if reference and self.reference is None:
            self.reference = ReferenceWeights(chunks)
        # Supervised answers were not sampled: their loss is the plain log-probability.
        temperature = 1.0 if self._supervised else config.rollout.rollout_temperature
        head = policy_head(chunks[-1], settings, temperature=temperature)
        self.policy = TrainableModel(
            config,
            settings,
            chunks,
            head,
            self._device,
            features=features,
            waits="critic" in needs,
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
        #: in the order in which checkpoints are checked and loaded
        self.features = features if self.critic is None else [*features, self.critic]
        self.learner = Learner(
            config,
            self._estimator,
            self.spec,
            self.policy,
            self.reference,
            self.critic,
            self.features,
            vocab_size=settings.vocab_size,
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
        every, gap_metrics = self.config.sync.rollout_quantization_gap_interval, dict[str, float]()
        with nullcontext() if self._profiles is None else self._profiles.step(batch.rollout):
            # Adapters are merged before weights are quantised, and the model holds both apart.
            if self._quantised is not None and self.adapters is None and batch.rollout % every == 0:
                gap_metrics = self._quantised.gap(self.policy, batch)  # before the weights move
            return self.learner.train(batch) | gap_metrics

    def routed_layers(self) -> tuple[int, ...]:
        """The layers of this rank whose routers replay the engines' choice of experts."""
        return self.policy.routed_layers

    def logged_tokens(self) -> LoggedTokens | None:
        """What the last `train` computed of the tokens that are logged, on rank 0; None if nothing is."""
        logged, self.learner.logged = self.learner.logged, None
        return logged if self._rank == 0 else None

    def log_probs(self, batch: TrainBatch) -> Ragged[np.float32]:
        """Log-probs of the response tokens under the current weights, at the rollout temperature: N x [T_i] float32.

        Also of those that are not trained on.
        """
        every = batch.loss_masks.like(np.ones_like(batch.loss_masks.flat))
        return every.like(self.policy.forward(dataclasses.replace(batch, loss_masks=every)).numpy())

    # --- weights and state --------------------------------------------------------------------------

    def named_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The full weights under their Hugging Face names, on rank 0; the other ranks must iterate too and get none.

        Raises:
            ConfigError: The run has no Hugging Face folder, which defines the names.
        """
        return self._weights_of(self._named())

    def _weights_of(self, model: Architecture, **options: Any) -> NamedTensors:
        self.policy.finish_param_gather()
        if self.adapters is not None:
            options["values_of"] = merged_values(self.policy.chunks)
        return named_hf_tensors(self.policy.chunks, model, **options)

    def _named(self) -> Architecture:
        """The model that is trained, with its Hugging Face names."""
        if self._trained is None:
            raise ConfigError(
                "without --hf-checkpoint the weights have no Hugging Face names; give the model's folder."
            )
        return self._trained

    def named_adapters(self) -> NamedTensors:
        """The full tensors of the adapters, if there are any, under PEFT's names; otherwise as `named_hf_weights`."""
        self.policy.finish_param_gather()
        return iter(()) if self.adapters is None else self.adapters.named(self.policy.chunks)

    def sync_weights(
        self,
        engine_urls: list[str],
        keys: EngineKeys | None,
        tp_size: int,
        version: str,
        restarts: int = 0,
        beside: Sequence[Sequence[int]] = (),
        receive: Receive | None = None,
    ) -> dict[str, float]:
        """Bring the engines to the policy's weights: every rank gathers; the first of each pipeline stage sends.

        Layers for multi-token prediction are sent if the engines draft with them.

        Args:
            engine_urls: One URL for each engine.
            keys: Keys of the engines; None if they have none.
            tp_size: Tensor-parallel size of an engine.
            version: Name of these weights, which the engines report with every token from now on.
            restarts: How often engines have been started again, so that each is connected to again.
            beside: `beside[engine][its rank]` is the trainer's rank on the same device; empty unless
                memory of several nodes is shared.
            receive: With --disk-delta, brings the copy of an engine to a version.

        Returns:
            Metrics, on rank 0: `synced_bytes` that were sent to each engine, and `perf/sync/...` of each stage.
        """
        assert self._synced is not None and self._sender is not None
        others = self._sender.ranks_beside(beside, self._device)
        with nullcontext() if others is None else others.sync():
            weights = self._weights_of(self._synced, by_stage=True, bucket_bytes=self._sender.gathered_bytes)
            if is_first_of_stage():
                return self._sender.send(
                    weights, engine_urls, keys, tp_size=tp_size, version=version, restarts=restarts, receive=receive
                )
            drain(weights)
        return {}

    def release_memory(self, parts: Sequence[Part]) -> None:
        """Let the engines have the memory of "training", and then that of the "weights": see `slime.train.offload`.

        Nothing may be called that needs it until it is restored; after "training", the weights can still be sent. The
        critic with its weights belongs to "training". The reference is in host memory all the time.
        """
        for part in parts:
            self.policy.release_memory(part)
            for model in self._beside() if part == "training" else ():
                model.release_memory("training")
                model.release_memory("weights")

    def restore_memory(self, parts: Sequence[Part]) -> None:
        """Bring back what `release_memory` released, the "weights" first."""
        for part in parts:
            self.policy.memory.restore(part)
            for model in self._beside() if part == "training" else ():
                model.memory.restore("weights")
                model.memory.restore("training")

    def _beside(self) -> Iterator[TrainableModel]:
        """The models that are trained beside the policy."""
        for feature in self.features:
            yield from feature.models()

    def held_bytes(self) -> int:
        """Bytes in use of this rank's GPU, by all processes together; on a CPU, by this process."""
        return held_bytes(self._device)

    def export_hf(self, folder: Path) -> None:
        """Write a complete Hugging Face model folder, with adapters merged and in a folder `adapter`; rank 0 writes."""
        weights, base = self.named_hf_weights(), Path(str(self.config.checkpoint.hf_checkpoint))
        adapters = self.named_adapters()
        also = None if self.adapters is None else partial(self.adapters.write, adapters)
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
        for feature in self.features:
            feature.save(folder, write)
        if self.reference is not None:
            self.reference.save(folder / REFERENCE_PART, write)

    def load(self, folder: Path, weights_only: bool = False) -> None:
        """Read what `save` wrote, under any parallel layout.

        Args:
            folder: The trainer's part of a checkpoint.
            weights_only: Start a new run from these weights: the optimizer is fresh, and they become the reference
                unless --ref-load names one.
        """
        self.policy.finish_param_gather()
        if self.adapters is None:
            refuse_adapters(folder)
        if self._trained is None or not self._trained.predicts:
            refuse_layers(folder, weights_only=weights_only)
        for feature in self.features:
            feature.check(folder, weights_only=weights_only)
        if self.reference is not None and not weights_only:
            self.reference.load(folder / REFERENCE_PART)
        self.policy.load(folder, weights_only=weights_only)
        if weights_only and self.reference is not None and self.config.checkpoint.ref_load is None:
            self.reference.renew()
        for feature in self.features:
            feature.load(folder, weights_only=weights_only)

    def continue_schedules(self, saved: RunConfig, rollouts_done: int) -> None:
        """After `load`: go on at the right place of the learning-rate schedules, from the steps of the `saved` run."""
        for model in (self.policy, *self._beside()):
            model.continue_schedule(saved, rollouts_done)

    def close(self, *, failed: bool = False) -> None:
        """Leave the process groups; nothing may be called afterwards. After an error pass `failed=True`."""
        try:
            if self._sender is not None:
                self._sender.close()
        finally:
            parallel.stop(failed=failed)
