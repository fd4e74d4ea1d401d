"""The contract of buffer filters names each broken rule."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from slime.plugin import Group, Selection
from slime.testing import assert_buffer_filter_contract, make_group, random_buffer


class First:
    """The oldest."""

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        return Selection(list(range(min(want, len(buffer)))))


class Mean(First):
    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        means = [sum(sample.reward for sample in group.samples) for group in buffer]
        return Selection(sorted(range(len(buffer)), key=means.__getitem__)[:want])


class TooMany(First):
    def select(self, buffer: Sequence[Group], want: int) -> Selection:  # noqa: ARG002
        return Selection(list(range(len(buffer))))


class Always(First):
    def select(self, buffer: Sequence[Group], want: int) -> Selection:  # noqa: ARG002
        return Selection([0][:want])


class NoReason(First):
    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        keep = super().select(buffer, want).keep
        return Selection(keep, dict.fromkeys(range(len(keep), len(buffer)), ""))


class Sorts(First):
    def select(self, buffer: Any, want: int) -> Selection:
        buffer.sort(key=lambda group: group.index)
        return super().select(buffer, want)


class Marks(First):
    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        for group in buffer:
            group.samples[0].metadata["age"] = 1
        return super().select(buffer, want)


class Chance(First):
    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        return Selection(random.sample(range(len(buffer)), min(want, len(buffer))))


class Rotates(First):
    """Starts one group later each time."""

    def __init__(self) -> None:
        self.calls = 0

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        self.calls += 1
        places = [(self.calls + place) % len(buffer) for place in range(len(buffer))]
        return Selection(places[:want])

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = state["calls"]


class Forgets(Rotates):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = state["calls"] + 1


class NoJson(Rotates):
    def state_dict(self) -> dict[str, Any]:
        return {"calls": object()}


class SavesOnly(First):
    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.slow
def test_a_filter_that_keeps_the_contract_passes() -> None:
    assert_buffer_filter_contract(First(), deterministic=True)
    assert_buffer_filter_contract(Chance())
    assert_buffer_filter_contract(Rotates())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "rule", "detail"),
    [
        (TooMany(), "keeps at most what is wanted", "kept 4 groups, expected at most 2"),
        (Always(), "keeps nothing from an empty buffer", "returned index 0"),
        (NoReason(), "keeps at most what is wanted", "with reason ''"),
        (Mean(), "returns valid and disjoint indices", "raised TypeError"),  # a failed sample has no reward
        (Sorts(), "does not change the buffer", "moved, added or removed"),
        (Marks(), "does not change the buffer", "changed Sample.metadata"),
        (Forgets(), "continues from", "expected the same (all that it remembers belongs in state_dict)"),
        (NoJson(), "has a state that is JSON", "returned a state_dict that is not JSON"),
        (SavesOnly(), "continues from", "expected both (it remembers something) or neither"),
        (Chance(), "makes the same choice for the same buffer", "expected the same"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, First) else "",
)
def test_a_broken_rule_is_named(chosen: First, rule: str, detail: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_buffer_filter_contract(chosen, deterministic=True)
    assert any(rule in line and detail in line for line in str(caught.value).splitlines()), caught.value


def test_random_buffers_are_ragged_with_failed_samples_and_without() -> None:
    buffers = [random_buffer(seed) for seed in range(60)]
    samples = [sample for buffer in buffers for group in buffer for sample in group.samples]
    assert {len(buffer) for buffer in buffers} == set(range(9))
    assert {len(group.samples) for buffer in buffers for group in buffer} == {1, 2, 3, 4, 5}
    assert {sample.status.name for sample in samples} == {"COMPLETED", "TRUNCATED", "FAILED"}
    assert all((sample.reward is None) == (sample.status.name == "FAILED") for sample in samples)


def test_make_group_sets_the_rewards() -> None:
    group = make_group((1.0, None), index=3, prompt="a", response="bc")
    assert [(s.reward, s.group_index, s.index, s.response_length) for s in group.samples] == [
        (1.0, 3, 3000, 2),
        (None, 3, 3001, 2),
    ]
