"""Which engines the error of a weight sync names, so that they are restarted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slime.errors import DeadlineError, EngineError, EngineRefusedError, SlimeError, WeightSyncError
from slime.weights.transports import distributed, transport
from slime.weights.transports.distributed import _end_group
from slime.weights.transports.transport import Fleet, FleetCall


class FaultyGroup:
    """A broadcast group whose end releases the engines that wait in it."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def close(self) -> None:
        self.ended.set()


def answers() -> None: ...


def fails(error: SlimeError) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


@pytest.fixture
def never() -> Any:
    """An engine that hangs, until the test has ended."""
    end = threading.Event()
    yield lambda: end.wait(60)
    end.set()


def begun(**engines: Callable[[], Any]) -> tuple[Fleet, FleetCall]:
    fleet = Fleet([SimpleNamespace(url=url, call=call) for url, call in engines.items()], 30)  # type: ignore[misc]  # stand-ins
    return fleet, fleet.start("receiving weights", lambda engine: engine.call())  # type: ignore[attr-defined]  # see above


def named(group: FaultyGroup, call: FleetCall, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whom the error names after a broadcast that has failed."""
    monkeypatch.setattr(distributed, "_ARRIVAL_S", 0.5)
    call.settle(0.5)
    error = WeightSyncError("the broadcast did not finish in time")
    try:
        call.raise_failed()
    except WeightSyncError as failed:
        error = failed
    stand_in: Any = group
    _end_group(stand_in, call, error)
    return error.urls


@pytest.mark.slow
def test_of_engines_that_wait_for_one_another_only_the_one_that_hangs_is_named(
    never: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = FaultyGroup()
    refusal = EngineRefusedError("status 400: connection closed by peer")

    def waits() -> None:
        assert group.ended.wait(60)
        raise refusal

    _, call = begun(a=waits, b=never, c=waits, d=answers)
    assert named(group, call, monkeypatch) == ["b"]


def test_an_engine_that_refuses_weights_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FaultyGroup()
    _, call = begun(a=fails(EngineRefusedError("status 400: wrong shape")), b=lambda: group.ended.wait(60))
    assert named(group, call, monkeypatch) == []


@pytest.mark.slow
def test_engines_that_hang_keep_nothing_from_the_others(
    never: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "CLEANUP_S", 0.5)
    answered: list[str] = []
    fleet, _ = begun(a=never, b=never, c=answers)
    for step in ("ending the update", "resuming"):

        def call(engine: Any, step: str = step) -> None:
            engine.call()
            answered.append(step)

        late = sorted(fleet.clean_up(step, call))
        assert late == [f"{step} at {url}: no answer in 0 s" for url in "ab"]
    assert answered == ["ending the update", "resuming"]
    fleet.close()


def test_no_call_begins_after_the_deadline() -> None:
    fleet = Fleet([], 0.0)
    with pytest.raises(WeightSyncError, match="no time was left for resuming") as caught:
        fleet.start("resuming", lambda _: None)
    assert caught.value.urls == []


@pytest.mark.parametrize("error", [EngineError("connection lost"), DeadlineError("no answer")])
def test_an_engine_that_cannot_answer_is_named(error: SlimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    group = FaultyGroup()
    _, call = begun(a=fails(error), b=lambda: group.ended.wait(60))
    assert named(group, call, monkeypatch) == ["a"]


def test_if_all_are_just_slow_those_that_had_not_answered_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FaultyGroup()
    _, call = begun(a=lambda: group.ended.wait(60), b=answers)
    assert named(group, call, monkeypatch) == ["a"]
