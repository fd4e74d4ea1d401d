"""Hypothesis strategies for what components are given. Hypothesis is imported when a strategy is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.plugin import EstimatorBatch
from slime.testing.samples import make_sample, random_batch
from slime.types import Group, Sample, Status

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def masks(*, max_length: int = 12, holes: bool = True) -> SearchStrategy[list[int]]:
    """A loss mask [T] of 0 and 1, 1 <= T <= max_length; all ones without `holes`."""
    from hypothesis import strategies as st

    return st.lists(st.integers(0, 1) if holes else st.just(1), min_size=1, max_size=max_length)


def rewards(*, bound: float = 100.0) -> SearchStrategy[float]:
    """A finite reward, often one of the usual values."""
    from hypothesis import strategies as st

    usual = st.sampled_from([0.0, 1.0, -1.0, 0.5])
    return usual | st.floats(-bound, bound, width=32)


def samples(*, index: int = 0, group_index: int = 0) -> SearchStrategy[Sample]:
    """A finished sample: any text, completed or truncated, with or without label, some with holes in the mask."""
    from hypothesis import strategies as st

    text = st.text(max_size=20)

    def build(prompt: str, response: str, label: str | None, truncated: bool, mask: list[int], reward: float) -> Sample:
        sample = make_sample(
            prompt or "?", response or "?", label=label, index=index, group_index=group_index, reward=reward
        )
        if truncated:
            sample.status, sample.finish_reason = Status.TRUNCATED, "length"
        length = sample.response_length
        sample.loss_mask = (mask * length)[:length]
        return sample

    return st.builds(build, text, text, st.none() | text, st.booleans(), masks(), rewards())


def groups(*, index: int = 0, max_size: int = 5) -> SearchStrategy[Group]:
    """A finished group of 1 to `max_size` samples; `Sample.index` counts up from 1000 x `index`."""
    from hypothesis import strategies as st

    def numbered(drawn: list[Sample]) -> Group:
        for number, sample in enumerate(drawn, start=1000 * index):
            sample.index = sample.rollout_id = number
        return Group(index, drawn)

    return st.lists(samples(group_index=index), min_size=1, max_size=max_size).map(numbered)


def estimator_batches(
    *, max_groups: int = 6, max_group: int = 16, kl: bool = False, values: bool = False
) -> SearchStrategy[EstimatorBatch]:
    """Ragged groups of 1 to `max_group` samples, scattered over the batch, with holes in masks and siblings.

    Args:
        max_groups: Groups at most.
        max_group: Samples of a group at most.
        kl: Whether the batch has KL.
        values: Whether the batch has values.
    """
    from hypothesis import strategies as st

    sizes = st.lists(st.integers(1, max_group), min_size=1, max_size=max_groups)

    def build(drawn: list[int], seed: int, equal: bool, siblings: bool) -> EstimatorBatch:
        return random_batch(drawn, seed, equal_rewards=equal, siblings=siblings, kl=kl, values=values)

    return st.builds(build, sizes, st.integers(0, 2**32), st.booleans(), st.booleans())
