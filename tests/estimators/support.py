"""Estimators by name, built as in a run, and batches for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st

from slime.plugin import Context, EstimatorBatch, EstimatorSpec
from slime_estimators import slime_register_estimators

SPECS: dict[str, EstimatorSpec] = {spec.name: spec for spec in slime_register_estimators()}
ALL = sorted(SPECS)
#: estimators that compare the rollouts of one prompt
GROUPED = sorted(name for name, spec in SPECS.items() if "group" in spec.needs)


def make(name: str, *, kl_coef: float = 0.0, longest: int = 1024, **options: Any) -> Any:
    """The estimator `name` in a run with that KL coefficient and longest response."""
    spec = SPECS[name]
    module, attribute = spec.factory.split(":")
    config = SimpleNamespace(
        algorithm=SimpleNamespace(kl_coef=kl_coef), rollout=SimpleNamespace(rollout_max_response_len=longest)
    )
    context = Context(seed=0, run_dir=Path(), logger=logging.getLogger("test"), config=config)
    return getattr(import_module(module), attribute)(spec.options(**options), context)


def batch_of(
    rewards: Sequence[float],
    groups: Sequence[int] | None = None,
    masks: Sequence[Sequence[int]] | None = None,
    *,
    rollouts: Sequence[int] | None = None,
    kl: Sequence[Sequence[float]] | None = None,
    values: Sequence[Sequence[float]] | None = None,
) -> EstimatorBatch:
    """A batch; by default one group of responses of one trained token, KL and values of zero."""
    count = len(rewards)
    masks = [[1]] * count if masks is None else masks

    def column(given: Sequence[Sequence[float]] | None) -> list[torch.Tensor]:
        return [torch.tensor(part, dtype=torch.float32) for part in given or [[0.0] * len(mask) for mask in masks]]

    return EstimatorBatch(
        rewards=torch.tensor(list(rewards), dtype=torch.float32),
        group_ids=torch.tensor([0] * count if groups is None else list(groups), dtype=torch.int64),
        rollout_ids=torch.tensor(list(range(count)) if rollouts is None else list(rollouts), dtype=torch.int64),
        loss_masks=column(masks),
        kl=column(kl),
        values=column(values),
    )


def tokens(name: str, batch: EstimatorBatch, **options: Any) -> list[list[float]]:
    """Advantages as lists."""
    return [part.tolist() for part in make(name, **options).advantages(batch).advantages]


def scalars(name: str, rewards: Sequence[float], groups: Sequence[int] | None = None, **options: Any) -> list[float]:
    """One advantage per sample, of responses of one token."""
    return [part[0] for part in tokens(name, batch_of(rewards, groups), **options)]


@st.composite
def batches(draw: st.DrawFn, max_group: int = 16) -> EstimatorBatch:
    """1 to 4 groups of 1 to 16 samples, shuffled; responses of 1 to 6 tokens, masks with holes, some all masked.

    Hypothesis chooses and shrinks only sizes. Numbers come from a seed, because drawing hundreds of floats one by one
    takes longer than any estimator.
    """
    sizes = draw(st.lists(st.integers(1, max_group), min_size=1, max_size=4))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    groups = torch.tensor([group for group, size in enumerate(sizes) for _ in range(size)])
    groups = groups[torch.randperm(len(groups), generator=generator)]
    lengths = torch.randint(1, 7, groups.shape, generator=generator).tolist()

    def columns() -> list[torch.Tensor]:
        return [3 * torch.randn(length, generator=generator) for length in lengths]

    return EstimatorBatch(
        rewards=3 * torch.randn(len(groups), generator=generator),
        group_ids=groups,
        rollout_ids=torch.arange(len(groups)),
        loss_masks=[(part > -1).float() for part in columns()],
        kl=columns(),
        values=columns(),
    )
