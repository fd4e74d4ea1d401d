"""The boundary around data sources."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from slime.errors import PluginContractError, PluginError
from slime.rollout.boundaries import CheckedSource
from slime.types import Group, Sample, Status


class FaultySource:
    """Returns prepared groups."""

    def __init__(self, groups: list[Group] | None = None, state: Any = None) -> None:
        self.groups = groups
        self.state: Any = {"position": 3, "order": [1, 2]} if state is None else state

    def take(self, n: int) -> list[Group]:
        if self.groups is None:
            raise OSError(f"disk gone after {n}")
        return self.groups

    def put(self, groups: Sequence[Group]) -> None:
        raise AssertionError(f"never called, got {len(groups)}")

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.state
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise KeyError(f"no {len(state)}")


def group(index: int, *samples: int, status: Status = Status.PENDING) -> Group:
    return Group(index, [Sample(group_index=index, index=i, status=status) for i in samples])


def take(groups: list[Group] | None, count: int = 2) -> list[Group]:
    return CheckedSource(FaultySource(groups), "data source faulty", 2).take(count)


def test_a_source_must_return_exactly_the_requested_groups() -> None:
    wanted = [group(7, 14, 15), group(8, 16, 17)]
    assert take(wanted) == wanted


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([group(7, 14, 15)], "returned 1 groups, expected 2"),
        ([group(7, 14, 15), group(7, 16, 17)], "several groups with the same index"),
        ([group(7, 14, 15), group(8, 15, 16)], "several samples with the same index"),
        ([group(7, 14, 15), group(8, 16)], "returned group 8 with 1 samples, expected --n-samples-per-prompt = 2"),
        ([group(7, 14, 15), group(8, 16, 17, status=Status.COMPLETED)], "status COMPLETED"),
        ([group(7, 14, 15), Group(8, group(9, 16, 17).samples)], "group_index 9"),
    ],
)
def test_a_source_that_breaks_its_contract_is_named(groups: list[Group], words: str) -> None:
    with pytest.raises(PluginContractError, match=words) as error:
        take(groups)
    assert str(error.value).startswith("data source faulty")


def test_an_error_in_a_source_names_it() -> None:
    with pytest.raises(PluginError, match=r"data source faulty: .*/test_source.py:\d+: OSError: disk gone after 2"):
        take(None)
    with pytest.raises(PluginError, match=r"data source faulty cannot continue from its saved state: .*: KeyError"):
        CheckedSource(FaultySource(), "data source faulty", 2).load({"position": 1})


def test_a_saved_state_is_independent_of_the_source() -> None:
    source = FaultySource([group(0, 0, 1)])
    state = CheckedSource(source, "s", 2).state()
    source.state["order"].append(3)
    assert state == {"position": 3, "order": [1, 2]}


def test_a_saved_state_keeps_infinity_and_lone_surrogates() -> None:
    source = FaultySource([group(0, 0, 1)], {"worst": -math.inf, "text": "\ud800", "seed": 2**70})
    assert CheckedSource(source, "s", 2).state() == {"worst": -math.inf, "text": "\ud800", "seed": 2**70}


@pytest.mark.parametrize("state", [{"rng": object()}, {"seen": {1: 2}}])
def test_a_state_that_is_not_json_is_refused_early(state: dict[str, Any]) -> None:
    with pytest.raises(PluginContractError, match=r"^s returned a state_dict that is not JSON"):
        CheckedSource(FaultySource([group(0, 0, 1)], state), "s", 2).take(1)


class Curious(FaultySource):
    """Has the method `generated`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[Any]] = []

    def generated(self, groups: Sequence[Group]) -> None:
        self.seen.append([sample.reward for group in groups for sample in group.samples])
        for one in groups:
            for sample in one.samples:
                sample.reward = float(len((sample.label or "").upper()))


def test_generated_gets_copies_of_the_groups() -> None:
    source, finished = Curious(), group(7, 14, 15, status=Status.COMPLETED)
    for place, sample in enumerate(finished.samples):
        sample.reward = float(place + 1)
    checked = CheckedSource(source, "data source curious", 2)
    checked.generated([finished])
    checked.generated([])
    CheckedSource(FaultySource(), "data source without the method", 2).generated([finished])
    assert source.seen == [[1.0, 2.0]]
    assert [sample.reward for sample in finished.samples] == [1.0, 2.0]


def test_an_error_in_generated_names_the_source() -> None:
    finished = group(7, 14, status=Status.COMPLETED)
    finished.samples[0].label = 3  # type: ignore[assignment]  # a label that is none
    with pytest.raises(PluginError, match=r"data source curious: .*/test_source.py:\d+: AttributeError"):
        CheckedSource(Curious(), "data source curious", 1).generated([finished])


class Reporting(FaultySource):
    """Has metrics, and can be closed."""

    def __init__(self, reported: Any) -> None:
        super().__init__()
        self.reported, self.closed = reported, False

    def metrics(self) -> Any:
        return self.reported

    def close(self) -> None:
        self.closed = True
        raise OSError("no such worker")


def test_metrics_of_a_source_must_be_numbers() -> None:
    assert CheckedSource(Reporting({"data/epoch": 1}), "s", 2).metrics() == {"data/epoch": 1.0}
    assert CheckedSource(FaultySource(), "s", 2).metrics() == {}
    for value in (float("nan"), "1", None):
        with pytest.raises(PluginContractError, match=r"s returned the metric 'data/epoch': .*, expected a finite"):
            CheckedSource(Reporting({"data/epoch": value}), "s", 2).metrics()


def test_an_error_in_close_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    source = Reporting({})
    CheckedSource(source, "data source s", 2).close()
    CheckedSource(FaultySource(), "s", 2).close()
    assert source.closed and "data source s cannot be closed" in caplog.text
