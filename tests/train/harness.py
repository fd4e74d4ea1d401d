"""Configurations, batches and an estimator for tests of the trainer's ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from slime.config import RunConfig
from slime.config.run_config import SECTIONS
from slime.plugin import Advantages, EstimatorBatch
from slime.rollout.train_batch import Ragged, TrainBatch
from slime.testing.ranks import PRELOADED, RankLauncher, run_ranks
from slime.train.micro_batches import PrefixGroup

__all__ = ["Centred", "RankLauncher", "alone", "make_batch", "make_config", "run_ranks"]

multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, "tests.support.preloaded"])


def make_config(
    folder: Path | None,
    *,
    world_size: int = 1,
    steps: int = 1,
    megatron: dict[str, Any] | None = None,
    **options: Any,
) -> RunConfig:
    """A run configuration: `options` are slime's own flags by field name, `megatron` Megatron's."""
    options = {
        "hf_checkpoint": None if folder is None else str(folder),
        "device": "cpu",
        "threads_per_rank": 1,
        "actor_num_gpus_per_node": world_size,
        "rollout_batch_size": 2 * steps,
        "num_steps_per_rollout": steps,
    } | options
    sections = {}
    for name, kind in SECTIONS.items():
        mine = {key: options.pop(key) for key in list(options) if key in kind.model_fields}
        sections[name] = kind(**mine)
    assert not options, options
    return RunConfig(megatron={"lr": 1e-2, "adam_eps": 1e-4} | (megatron or {}), **sections)


def make_batch(
    *,
    seed: int = 0,
    samples: int = 8,
    vocab: int = 128,
    prompt: tuple[int, int] = (2, 9),
    response: tuple[int, int] = (1, 24),
    steps: int = 1,
    group: int = 4,
    masked: bool = True,
    rollout_log_probs: bool = False,
    same_prompts: bool = False,
) -> TrainBatch:
    """Random ragged samples.

    With `masked`, some response tokens carry no loss and one sample none at all. With `same_prompts`, those of a
    group have the same prompt.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(response[0], response[1] + 1, samples)
    prompts = rng.integers(prompt[0], prompt[1] + 1, samples)
    masks = [np.ones(n, dtype=np.float32) for n in lengths]
    if masked:
        masks = [(rng.random(n) < 0.8).astype(np.float32) for n in lengths]
        masks[-1][:] = 0
    tokens = [rng.integers(3, vocab, p + t).astype(np.int32) for p, t in zip(prompts, lengths, strict=True)]
    if same_prompts:
        firsts = [tokens[i - i % group][: prompts[i - i % group]] for i in range(samples)]
        tokens = [np.concatenate([first, whole[-n:]]) for first, whole, n in zip(firsts, tokens, lengths, strict=True)]
    return TrainBatch(
        rollout=0,
        tokens=Ragged.of(tokens, np.int32),
        loss_masks=Ragged.of(masks, np.float32),
        rewards=rng.random(samples).astype(np.float32),
        group_ids=np.arange(samples, dtype=np.int64) // group,
        # two samples of one rollout share its weight
        rollout_ids=np.maximum(np.arange(samples, dtype=np.int64), 1),
        step_ids=np.arange(samples, dtype=np.int64) * steps // samples,
        sample_ids=100 + np.arange(samples, dtype=np.int64),
        rollout_log_probs=(
            Ragged.of([-rng.random(n).astype(np.float32) for n in lengths], np.float32) if rollout_log_probs else None
        ),
    )


def alone(samples: Iterable[int]) -> list[PrefixGroup]:
    """Samples that share no tokens with others."""
    return [PrefixGroup((i,)) for i in samples]


class Centred:
    """Reward minus the group's mean on every trained token, minus `kl_coef` x KL if there is a reference."""

    def __init__(self, kl_coef: float = 0.0) -> None:
        self.kl_coef = kl_coef

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        values = []
        for i, mask in enumerate(batch.loss_masks):
            mean = batch.rewards[batch.group_ids == batch.group_ids[i]].mean()
            value = (batch.rewards[i] - mean) * mask
            if batch.kl is not None:
                value = value - self.kl_coef * batch.kl[i] * mask
            values.append(value)
        return Advantages(values)
