"""The contract of data sources names each broken rule."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from slime.plugin import Group, Sample, Status
from slime.testing import assert_datasource_contract, make_sample


class Counting:
    """Endless additions, two samples each."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, n: int) -> list[Group]:
        first, self.next = self.next, self.next + n
        return [self.group(number) for number in range(first, self.next)]

    def group(self, number: int) -> Group:
        return Group(
            number,
            [make_sample(f"{number}+1=", None, label=None, index=2 * number + i, group_index=number) for i in range(2)],
        )

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


class OneSample(Counting):
    def group(self, number: int) -> Group:
        whole = super().group(number)
        return Group(number, whole.samples[:1])


class SameIndex(Counting):
    def group(self, number: int) -> Group:
        return super().group(number % 5)


class Unseeded(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.next = random.randrange(10**6)


class NoJson(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"next": {self.next}}


class StateMoves(Counting):
    def state_dict(self) -> dict[str, Any]:
        self.next += 1
        return super().state_dict()


class Forgets(Counting):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = min(state["next"], 4)


def test_a_source_that_keeps_the_contract_passes() -> None:
    assert_datasource_contract(Counting, samples_per_prompt=2)


@pytest.mark.parametrize(
    ("source", "rule", "detail"),
    [
        (OneSample, "as many groups of pending samples", "returned group 0 with 1 samples"),
        (SameIndex, "never gives an index twice", "several groups with the same index"),
        (Unseeded, "same order each time it is built", "Context.seed"),
        (NoJson, "has a state that is JSON", "not JSON"),
        (StateMoves, "reading it has no effect", "asked for its state before"),
        (Forgets, "continues where it was saved", "loaded from the state after 5 prompts"),
    ],
)
def test_a_broken_rule_is_named(source: type[Counting], rule: str, detail: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_datasource_contract(source, samples_per_prompt=2)
    assert any(rule in line and detail in line for line in str(caught.value).splitlines()), caught.value


def test_a_pending_sample_has_the_tokens_of_its_prompt_only() -> None:
    sample: Sample = make_sample("1+1=", None)
    assert (sample.status, sample.response_length, len(sample.tokens)) == (Status.PENDING, 0, 4)
