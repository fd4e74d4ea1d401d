"""The contract of data sources finds each breach by name."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from slime.plugin import Group, Sample, Status
from slime.testing import assert_datasource_contract, make_sample


class Counting:
    """Endless additions, two samples each."""

    def __init__(self) -> None:
        self.next = 0
        self.returned: list[int] = []

    def take(self, n: int) -> list[Group]:
        numbers, self.returned = self.returned[:n], self.returned[n:]
        while len(numbers) < n:
            numbers.append(self.next)
            self.next += 1
        return [self.group(number) for number in numbers]

    def group(self, number: int) -> Group:
        return Group(
            number,
            [make_sample(f"{number}+1=", None, label=None, index=2 * number + i, group_index=number) for i in range(2)],
        )

    def put(self, groups: Sequence[Group]) -> None:
        self.returned += [group.index for group in groups]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "returned": self.returned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next, self.returned = state["next"], list(state["returned"])


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


class PutLast(Counting):
    def take(self, n: int) -> list[Group]:
        self.returned, kept = [], self.returned
        groups = super().take(n)
        self.returned = kept
        return groups


class PutFinished(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Group] = []

    def take(self, n: int) -> list[Group]:
        groups, self.kept = self.kept[:n], self.kept[n:]
        return groups + super().take(n - len(groups))

    def put(self, groups: Sequence[Group]) -> None:
        self.kept += groups


class PutRenewed(PutFinished):
    def put(self, groups: Sequence[Group]) -> None:
        self.kept += groups
        for group in groups:
            for sample in group.samples:
                sample.status = Status.PENDING


class PutEmptied(PutRenewed):
    def put(self, groups: Sequence[Group]) -> None:
        super().put(groups)
        for group in groups:
            for sample in group.samples:
                sample.tokens = sample.tokens[-sample.response_length :]


class KeepsPartial(Counting):
    """Gives back what had been generated, to be continued; it is in its state too."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Group] = []

    def take(self, n: int) -> list[Group]:
        groups, self.kept = self.kept[:n], self.kept[n:]
        return groups + super().take(n - len(groups))

    def put(self, groups: Sequence[Group]) -> None:
        for group in groups:
            for sample in group.samples:
                sample.status = Status.PENDING
            self.kept.append(group)

    def state_dict(self) -> dict[str, Any]:
        rows = [[group.index, [sample.to_dict() for sample in group.samples]] for group in self.kept]
        return {"next": self.next, "kept": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]
        self.kept = [Group(index, [Sample.from_dict(row) for row in rows]) for index, rows in state["kept"]]


class PutUnsaved(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "returned": []}


@pytest.mark.parametrize("source", [Counting, KeepsPartial])
def test_a_source_that_keeps_the_contract_passes(source: type[Counting]) -> None:
    assert_datasource_contract(source, samples_per_prompt=2)


@pytest.mark.parametrize(
    ("source", "rule", "detail"),
    [
        (OneSample, "as many groups of pending samples", "gave group 0 1 samples"),
        (SameIndex, "never gives an index twice", "one group index to several"),
        (Unseeded, "same order each time it is built", "Context.seed"),
        (NoJson, "has a state that is JSON", "no JSON"),
        (StateMoves, "reading it changes nothing", "asked for its state before"),
        (Forgets, "continues where it was saved, after 5 prompts", "loaded from a state"),
        (PutLast, "gives what was put back first", "which were put back"),
        (PutFinished, "gives what was put back first", "status ABORTED"),
        (PutEmptied, "gives what was put back first", "prompt tokens and indices they had"),
        (PutUnsaved, "keeps what was put back in its state", "which were put back"),
    ],
)
def test_a_breach_is_named(source: type[Counting], rule: str, detail: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_datasource_contract(source, samples_per_prompt=2)
    assert any(rule in line and detail in line for line in str(caught.value).splitlines()), caught.value


def test_a_pending_sample_has_the_tokens_of_its_prompt_only() -> None:
    sample: Sample = make_sample("1+1=", None)
    assert (sample.status, sample.response_length, len(sample.tokens)) == (Status.PENDING, 0, 4)


class NoPut:
    """A source with what the contract requires and no more."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, n: int) -> list[Group]:
        first, self.next = self.next, self.next + n
        return [Counting().group(number) for number in range(first, self.next)]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


def test_a_source_need_not_take_groups_back() -> None:
    assert_datasource_contract(NoPut, samples_per_prompt=2)
