"""The critic: a value model beside the policy on the same ranks, with its own optimizer and part of the checkpoint."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from slime.errors import CheckpointError
from slime.train.checkpoint_io import load_state, save_state
from slime.train.forward import Pipeline
from slime.train.heads import value_head
from slime.train.model import build_chunks, connect_schedule, wrap_chunks
from slime.train.model_folder import read_same_model
from slime.train.optimizer import build_optimizer, build_scheduler, take_step
from slime.train.packing import MicroBatch
from slime.train.scoring import score_batch
from slime.train.settings import TrainSettings
from slime.train.statistics import sum_over_ranks
from slime.train.timing import timed
from slime.train.value_loss import ValueColumns, micro_batch_value_loss, value_metrics
from slime.train.value_model import ValueHead, copy_backbone, value_model
from slime.weights import load_hf_backbone

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.data import TrainBatch

#: its folder inside the trainer's part of a checkpoint
CRITIC_PART = "critic"
#: (batch, samples) -> this rank's share of them, as micro-batches
Packer = Callable[["TrainBatch", list[int]], list[MicroBatch]]


class Critic:
    """The policy's transformer with a `ValueHead`, under the same parallel layout.  Every method is collective.

    It starts from the policy's weights or from those of `--critic-load`.  Its optimizer and schedule are the policy's
    but for the learning rate (`--critic-lr`).
    """

    def __init__(
        self,
        config: RunConfig,
        settings: TrainSettings,
        *,
        policy: list[Any],
        hf_config: Mapping[str, Any] | None,
        pack: Packer,
        device: torch.device,
    ) -> None:
        """policy      the policy's bare chunks, with the weights that the run starts from
        hf_config   config.json of `--hf-checkpoint`, if there is one

        Raises `ConfigError` for a `--critic-load` of another architecture, `CheckpointError` for an unreadable one.
        """
        lr = config.algorithm.critic_lr
        self._config, self._policy, self._pack, self._device = config, policy, pack, device
        self._settings = settings = _with_learning_rate(settings, lr)
        self._bare = build_chunks(settings, device, value_model)
        folder = config.algorithm.critic_load
        if folder is None:
            copy_backbone(policy, self._bare)
        else:
            self._load_hf(Path(folder), hf_config)
        self._chunks = wrap_chunks(settings, self._bare)
        self._optimizer = build_optimizer(settings, self._chunks)
        self._scheduler = build_scheduler(config, settings, self._optimizer, "--lr" if lr is None else "--critic-lr")
        connect_schedule(settings, self._chunks, self._optimizer.scale_loss)
        self._pipeline = Pipeline(settings, self._chunks, value_head)

    def values(self, batch: TrainBatch) -> list[Tensor]:
        """N x [T_i] float32 on the CPU, the same on every rank, masked tokens too.

        V_t is the value of the state before token t: of the prompt and the response's tokens up to t - 1.
        """
        self._settle()
        packed = self._pack(batch, list(range(len(batch.tokens))))
        return score_batch(self._pipeline, batch, packed, self._device)

    def train(
        self, batch: TrainBatch, steps: Sequence[int], columns: ValueColumns, seconds: dict[str, float]
    ) -> dict[str, float]:
        """One optimizer step for each of `steps`, of the samples with its number; metrics, the same on every rank.

        Raises `TrainerError` when the loss or the gradient is not finite.
        """
        sums: dict[str, float] = {}
        norms: list[float] = []
        lr = 0.0
        with timed(seconds, "time/critic"):
            for step in steps:
                packed = self._pack(batch, np.flatnonzero(batch.step_ids == step).tolist())
                loss = partial(micro_batch_value_loss, self._config.algorithm.value_clip, columns)
                seen = sum_over_ranks(self._pipeline.train(packed, loss))
                norm, lr = take_step(
                    self._optimizer,
                    self._scheduler,
                    where=f"critic, rollout {batch.rollout}, step {step}",
                    sums=seen,
                    scaled=self._settings.transformer.fp16,
                )
                norms.append(norm)
                for name, value in seen.items():
                    sums[name] = sums.get(name, 0.0) + value
        return value_metrics(columns) | {
            "value_loss": sums["loss"] / len(norms),
            "value_clip_fraction": sums["clipped"] / max(sums["tokens"], 1.0),
            "critic_grad_norm": sum(norms) / len(norms),
            "critic_lr": lr,
        }

    def skip(self, steps: int) -> None:
        """Count steps without a trained token in the schedule; they change nothing else."""
        self._scheduler.step(increment=steps)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and schedule into the trainer's part of a checkpoint, beside the policy's."""
        self._settle()
        save_state(folder / CRITIC_PART, self._bare, self._optimizer, self._scheduler)

    def check(self, folder: Path) -> None:
        """Raise `CheckpointError` for a trainer's part without a critic's, before anything of it is read."""
        if not (folder / CRITIC_PART / "metadata.json").is_file():
            raise CheckpointError(
                f"{folder} was saved by a run without a critic (it has no {CRITIC_PART}/), and this run's estimator"
                " needs one: resuming would go on with an untrained critic. Load a checkpoint of a run with a critic,"
                " or start a new run from these weights with --initial-megatron-checkpoint."
            )

    def load(self, folder: Path, *, weights_only: bool) -> None:
        """Read what `save` wrote, under any parallel layout.

        weights_only   for a new run, once the policy has its weights: the saved critic's weights, or, from a run
                       without a critic, the policy's.  `--critic-load` goes before both.
        """
        self._settle()
        part = folder / CRITIC_PART
        if weights_only and self._config.algorithm.critic_load is not None:
            return
        if weights_only and not part.is_dir():
            copy_backbone(self._policy, self._bare)
            self._optimizer.reload_model_params()
            return
        load_state(part, self._bare, self._optimizer, self._scheduler, weights_only=weights_only)

    def _load_hf(self, folder: Path, hf_config: Mapping[str, Any] | None) -> None:
        theirs = read_same_model(folder, hf_config, "--critic-load", output_layer=False)
        score = load_hf_backbone(self._bare, folder, theirs)
        for module in (module for chunk in self._bare for module in chunk.modules()):
            if score is not None and isinstance(module, ValueHead):
                with torch.no_grad():
                    module.weight.copy_(score)

    def _settle(self) -> None:
        """Have the parameters that an overlapped all-gather would only bring with the next forward pass."""
        if self._settings.ddp.overlap_param_gather:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)


def _with_learning_rate(settings: TrainSettings, lr: float | None) -> TrainSettings:
    """The policy's settings for another model: its own copies of what Megatron writes to, and its learning rate."""
    optimizer = copy.copy(settings.optimizer)
    if lr is not None:
        optimizer.lr = lr
    return dataclasses.replace(settings, transformer=copy.copy(settings.transformer), optimizer=optimizer)
