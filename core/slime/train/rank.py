"""One training rank: everything the trainer does, behind one class."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from slime.data import loss_weights, plan_micro_batches
from slime.errors import ConfigError, TrainerError
from slime.plugin import Estimator, EstimatorSpec
from slime.train import parallel
from slime.train.advantages import estimate
from slime.train.checkpoint_io import load_state, save_state
from slime.train.critic import Critic
from slime.train.engine_log_probs import check_agreement, check_finite, required
from slime.train.forward import Pipeline
from slime.train.heads import policy_head
from slime.train.kl import kl_per_token
from slime.train.loss import LossColumns, LossTerms, micro_batch_loss
from slime.train.metrics import add_sums, advantage_metrics, token_means
from slime.train.model import build_chunks, connect_schedule, wrap_chunks
from slime.train.model_folder import read_same_model
from slime.train.optimizer import build_optimizer, build_scheduler, take_step
from slime.train.packing import MicroBatch, PackingRule, flat_column
from slime.train.reference import REFERENCE_PART, ReferenceWeights
from slime.train.scoring import score_batch
from slime.train.settings import TrainSettings, train_settings
from slime.train.statistics import sum_over_ranks
from slime.train.timing import timed
from slime.train.value_loss import ValueColumns
from slime.train.whitening import whiten
from slime.weights import architecture, load_hf, named_hf_tensors, read_hf_config

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.data import TrainBatch


class MegatronRank:
    """One rank of the trainer.  Every method is collective: all ranks call it, with the same arguments.

    estimator   turns rewards into advantages; None for supervised fine-tuning
    spec        what the estimator declares: what it needs, and the level of its ratio

    After an error on any rank, `close(failed=True)` is all that may still be called.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        master_addr: str,
        master_port: int,
        estimator: Estimator | None,
        spec: EstimatorSpec | None = None,
    ) -> None:
        self._config = config
        self._supervised = config.algorithm.loss_type == "sft_loss"
        if not self._supervised and estimator is None:
            raise ConfigError("loss_type policy_loss needs an advantage estimator (--advantage-estimator).")
        self._estimator = None if self._supervised else estimator
        self._hf_config = self._read_hf_config()
        hf = None if self._hf_config is None else architecture(self._hf_config)
        self._settings = train_settings(config, None if hf is None else (hf.transformer, hf.gpt))
        self._device = parallel.start(
            config,
            self._settings.transformer,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            master_addr=master_addr,
            master_port=master_port,
        )
        with parallel.teardown_on_error():
            self._build(self._settings, spec)

    def _read_hf_config(self) -> dict[str, Any] | None:
        folder = self._config.checkpoint.hf_checkpoint
        return None if folder is None else read_hf_config(Path(folder))

    def _build(self, settings: TrainSettings, spec: EstimatorSpec | None) -> None:
        config, algorithm = self._config, self._config.algorithm
        needs = frozenset() if spec is None else spec.needs
        self._bare = build_chunks(settings, self._device)
        self._chunks = wrap_chunks(settings, self._bare)
        self._estimator_wants_kl = not self._supervised and (algorithm.kl_coef != 0 or "reference" in needs)
        reference = self._estimator_wants_kl or (not self._supervised and algorithm.use_kl_loss)
        self._reference: ReferenceWeights | None = None
        if reference and config.checkpoint.ref_load is not None:
            self._load_hf(Path(config.checkpoint.ref_load), "--ref-load")
            self._reference = ReferenceWeights(self._bare)
        if config.checkpoint.hf_checkpoint is not None:
            self._load_hf(Path(config.checkpoint.hf_checkpoint), "--hf-checkpoint")
        if reference and self._reference is None:
            self._reference = ReferenceWeights(self._bare)
        self._optimizer = build_optimizer(settings, self._chunks)
        idle = algorithm.num_critic_only_steps if "critic" in needs else 0
        self._scheduler = build_scheduler(config, settings, self._optimizer, idle_rollouts=idle)
        self._last_lr = 0.0
        self._rollouts_seen = 0
        connect_schedule(settings, self._chunks, self._optimizer.scale_loss)
        # Supervised answers were not sampled: their loss is the plain log-probability.
        temperature = 1.0 if self._supervised else config.rollout.rollout_temperature
        self._pipeline = Pipeline(settings, self._chunks, policy_head(settings, temperature=temperature))
        self._packing = PackingRule(
            tensor_parallel_size=settings.transformer.tensor_model_parallel_size,
            sequence_parallel=settings.transformer.sequence_parallel,
            cp_size=settings.transformer.context_parallel_size,
            cp_rank=parallel_state.get_context_parallel_rank(),
            device=self._device,
        )
        self._critic: Critic | None = None
        if "critic" in needs:
            self._critic = Critic(
                config, settings, policy=self._bare, hf_config=self._hf_config, pack=self._pack, device=self._device
            )
        self._terms = LossTerms.of(algorithm, self._estimator, spec)

    # --- training -----------------------------------------------------------------------------------

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """All optimizer steps of one rollout; metrics, the same on every rank but for the times.

        Per-token metrics are means over the trained tokens of the batch, `loss` and `grad_norm` means over its
        steps, `time/...` seconds of this rank's phases.  Raises `TrainerError` when the loss or the gradient is
        not finite, `PluginContractError` when the estimator breaks its contract.

        A step without a single trained token changes nothing, neither weights nor the optimizer's moments; only
        the schedule counts it (`skipped_steps`).  Where there is a critic it is trained first; in the first
        `--num-critic-only-steps` rollouts it alone is, and the policy's metrics are absent.
        """
        if not batch.tokens:
            raise TrainerError(f"rollout {batch.rollout} has no trainable sample: there is nothing to train on.")
        seconds: dict[str, float] = {}
        steps, skipped = _steps_of(batch)
        metrics: dict[str, float] = {"skipped_steps": len(skipped)} if skipped else {}
        sums: dict[str, float] = {"tokens": 0.0, "loss": 0.0, "micro_batches": 0.0}
        norms = [0.0]
        critic_only = self._critic is not None and batch.rollout < self._config.algorithm.num_critic_only_steps
        if steps:
            columns, seen = self._columns(batch, seconds, steps=0 if critic_only else len(steps))
            metrics |= seen
            if self._critic is not None and columns.critic is not None:
                metrics |= self._critic.train(batch, steps, columns.critic, seconds)
            if not critic_only:
                norms = [self._step(batch, step, columns, sums, seconds) for step in steps]
        if self._critic is not None:
            self._critic.skip(len(skipped))
        if not critic_only:
            self._scheduler.step(increment=len(skipped))
            metrics |= token_means(sums, steps=len(norms))
            metrics["grad_norm"] = sum(norms) / len(norms)
            metrics["lr"] = self._last_lr
        self._rollouts_seen += 1
        self._renew_reference(batch.rollout + 1)
        return metrics | seconds

    def _renew_reference(self, rollouts_done: int) -> None:
        """Where due, the reference takes the policy's weights (`--ref-update-interval`)."""
        every = self._config.algorithm.ref_update_interval
        if self._reference is not None and every is not None and rollouts_done % every == 0:
            self._settle()
            self._reference.renew()

    def log_probs(self, batch: TrainBatch) -> list[np.ndarray[Any, Any]]:
        """Log-probs of the response tokens under the present weights, at the rollout temperature: N x [T_i] float32."""
        return [part.numpy() for part in self._score(batch)]

    def _columns(
        self, batch: TrainBatch, seconds: dict[str, float], *, steps: int
    ) -> tuple[LossColumns, dict[str, float]]:
        """Per-token data that must be known before the first of the policy's `steps`, and metrics of the advantages."""
        flat = partial(flat_column, device=self._device)
        algorithm = self._config.algorithm
        weights = flat(
            loss_weights(
                batch,
                per_token=algorithm.calculate_per_token_loss,
                constant_length=algorithm.loss_constant_length,
            )
        )
        mask = flat(batch.loss_masks)
        if self._estimator is None:
            return LossColumns(weights, mask), {}
        check_finite(batch)
        ref = old = kl = None
        by_engine = bool(algorithm.use_rollout_logprobs)
        # In a single step the policy does not move before its tokens are used: the training pass gives old log-probs.
        if (steps > 1 and not by_engine) or self._estimator_wants_kl or algorithm.true_on_policy_mode:
            with timed(seconds, "time/old_log_probs"):
                old = self._score(batch)
        if algorithm.true_on_policy_mode and old is not None:
            check_agreement(batch, old, algorithm.true_on_policy_tolerance)
        if self._reference is not None and (steps or self._estimator_wants_kl):
            self._settle()  # exchanging weights that are still arriving would leave stale ones behind
            with timed(seconds, "time/ref_log_probs"), self._reference.in_model():
                ref = self._score(batch)
        values = None
        if self._critic is not None:
            with timed(seconds, "time/values"):
                values = self._critic.values(batch)
        with timed(seconds, "time/advantages"):
            if self._estimator_wants_kl and ref is not None and old is not None:
                kl = [kl_per_token(a, b, algorithm.kl_reward_type) for a, b in zip(old, ref, strict=True)]
            passive = self._rollouts_seen < self._config.rollout.passive_checks
            answer = estimate(self._estimator, batch, kl, values, passive=passive)
            advantages = answer.advantages
            if algorithm.normalize_advantages:
                advantages = whiten(advantages, [torch.from_numpy(mask) for mask in batch.loss_masks])
        if by_engine:
            old = required(
                batch,
                "--use-rollout-logprobs (the default with --async, filters and over-sampling; --no-use-rollout-logprobs"
                " drops it)",
            )
        for option, chosen in (
            ("--off-policy-correction (or --use-tis)", self._terms.correction),
            ("--off-policy-sequence-delta", self._terms.sequence_delta),
        ):
            if chosen is not None:
                required(batch, option)
        columns = LossColumns(
            weights,
            mask,
            advantages=flat(advantages),
            old_log_probs=None if old is None else flat(old),
            old_by_engine=by_engine,
            ref_log_probs=None if ref is None else flat(ref),
            rollout_log_probs=None if batch.rollout_log_probs is None else flat(batch.rollout_log_probs),
            critic=(
                None
                if values is None or answer.returns is None
                else ValueColumns(weights, mask, flat(values), flat(answer.returns))
            ),
        )
        return columns, advantage_metrics(advantages, batch)

    def _step(
        self,
        batch: TrainBatch,
        step: int,
        columns: LossColumns,
        sums: dict[str, float],
        seconds: dict[str, float],
    ) -> float:
        """One optimizer step: adds to `sums` and `seconds`, returns the gradient norm."""
        where = f"rollout {batch.rollout}, step {step}"
        with timed(seconds, "time/forward_backward"):
            packed = self._pack(batch, np.flatnonzero(batch.step_ids == step).tolist())
            seen = sum_over_ranks(self._pipeline.train(packed, partial(micro_batch_loss, self._terms, columns)))
            seen["micro_batches"] = len(packed)
        add_sums(sums, seen)
        with timed(seconds, "time/optimizer"):
            norm, self._last_lr = take_step(
                self._optimizer, self._scheduler, where=where, sums=seen, scaled=self._settings.transformer.fp16
            )
        return norm

    # --- micro-batches and scoring ------------------------------------------------------------------

    def _pack(self, batch: TrainBatch, samples: list[int]) -> list[MicroBatch]:
        """This data-parallel rank's share of some samples; every rank gets the same number of micro-batches."""
        algorithm = self._config.algorithm
        plan = plan_micro_batches(
            [len(batch.tokens[i]) for i in samples],
            num_ranks=parallel_state.get_data_parallel_world_size(),
            max_tokens=algorithm.max_tokens_per_gpu * self._packing.cp_size,
            micro_batch_size=algorithm.micro_batch_size,
        )
        mine = [[samples[k] for k in group] for group in plan[parallel_state.get_data_parallel_rank()]]
        # The interleaved schedule takes micro-batches by the number of stages.
        transformer = self._settings.transformer
        multiple = (
            1 if transformer.virtual_pipeline_model_parallel_size is None else transformer.pipeline_model_parallel_size
        )
        count = -(-max(1, *(len(one) for one in plan)) // multiple) * multiple
        packed = [self._packing.pack(batch, group) for group in mine if group]
        while len(packed) < count:
            shortest = min(samples, key=lambda i: len(batch.tokens[i]))
            packed.append(self._packing.pack(batch, [shortest], counts=False))
        return packed

    def _score(self, batch: TrainBatch) -> list[Tensor]:
        self._settle()
        packed = self._pack(batch, list(range(len(batch.tokens))))
        return score_batch(self._pipeline, batch, packed, self._device)

    # --- weights and state --------------------------------------------------------------------------

    def named_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The full weights under their Hugging Face names, on rank 0; other ranks take part and yield nothing.

        Raises `ConfigError` where no Hugging Face folder says what the names are.
        """
        if self._hf_config is None:
            raise ConfigError(
                "without --hf-checkpoint the weights have no Hugging Face names; give the model's folder."
            )
        self._settle()
        return named_hf_tensors(self._bare, self._hf_config)

    def save(self, path: Path) -> None:
        """Write weights, optimizer, schedule and random states; `path` must be new or empty."""
        self._settle()
        save_state(path, self._bare, self._optimizer, self._scheduler)
        if self._critic is not None:
            self._critic.save(path)
        if self._reference is not None:
            self._reference.save(path / REFERENCE_PART)

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Read what `save` wrote, under any parallel layout.

        weights_only   start a new run from these weights: the optimizer is fresh, and they become the reference
                       unless --ref-load names one
        """
        self._settle()
        if self._critic is not None and not weights_only:
            self._critic.check(path)
        if self._reference is not None and not weights_only:
            self._reference.load(path / REFERENCE_PART)
        load_state(path, self._bare, self._optimizer, self._scheduler, weights_only=weights_only)
        if weights_only and self._reference is not None and self._config.checkpoint.ref_load is None:
            self._reference.renew()
        if self._critic is not None:
            self._critic.load(path, weights_only=weights_only)

    def close(self, *, failed: bool = False) -> None:
        """Leave the process groups; nothing may be called afterwards.  After an error pass `failed=True`."""
        parallel.stop(failed=failed)

    def _settle(self) -> None:
        """Have the parameters that an overlapped all-gather would only bring with the next forward pass."""
        if self._settings.ddp.overlap_param_gather:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)

    def _load_hf(self, folder: Path, option: str) -> None:
        load_hf(self._bare, folder, read_same_model(folder, self._hf_config, option))


def _steps_of(batch: TrainBatch) -> tuple[list[int], list[int]]:
    """The optimizer steps that train any token, and those that train none, in order."""
    trained = np.array([bool(mask.any()) for mask in batch.loss_masks])
    with_tokens = set(np.unique(batch.step_ids[trained]).tolist())
    steps = np.unique(batch.step_ids).tolist()
    return [step for step in steps if step in with_tokens], [step for step in steps if step not in with_tokens]
