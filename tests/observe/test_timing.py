"""How the time of a step is accounted for."""

from __future__ import annotations

import pytest

from slime.observe.timing import BusyClock, IdleClock, kernel_overhead


class FakeClock:
    """A clock that moves only when a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_overlapping_activities_count_once() -> None:
    clock = FakeClock()
    busy, began = BusyClock(clock), clock.now
    clock.now = began + 2
    busy.ended(began + 1)
    clock.now = began + 3
    busy.ended(began)  # busy for 3 s
    clock.now = began + 15
    busy.ended(began + 13)  # after 10 s without any
    assert busy.seconds == 5.0


def test_of_overlapping_requests_only_the_time_inside_an_engine_counts_and_once() -> None:
    clock = FakeClock()
    engine = BusyClock(clock)
    began = clock.now
    clock.now = began + 3.0
    engine.ended(began, 2.0)  # inside from 1 to 3
    clock.now = began + 4.0
    engine.ended(began, 2.5)  # inside from 1.5 to 4
    assert engine.seconds == 3.0
    clock.now = began + 20.0
    engine.ended(began + 4.5, 1.0)  # waited long for a place; inside from 19 to 20
    assert engine.seconds == 4.0
    engine.ended(began + 10.0, None)  # lost: from 10 to 20
    assert engine.seconds == 13.0
    engine.ended(began + 18.0, 60.0)  # clocks differ
    assert engine.seconds == 13.0


def test_an_idle_clock_counts_from_the_first_activity_to_the_next() -> None:
    clock = FakeClock()
    idle = IdleClock(clock)
    clock.now += 5
    assert idle.take() == 0.0  # nothing has begun
    with idle.activity():
        clock.now += 1
        with idle.activity():
            clock.now += 1
        assert idle.take() == 0.0
    clock.now += 3
    with idle.activity():
        clock.now += 1
    clock.now += 2
    assert (idle.take(), idle.take()) == (5.0, 0.0)


@pytest.mark.row("W2")
def test_kernel_overhead_excludes_the_time_of_engines_and_trainer() -> None:
    phases = {
        "time/engine": 5.0,
        "time/forward_backward": 2.0,
        "time/ref_log_probs": 1.0,
        "time/optimizer": 1.0,
        "time/generate": 5.4,  # contains the engine time
        "time/sync_weights": 0.3,
    }
    assert kernel_overhead(10.0, phases) == pytest.approx(0.1)


def test_kernel_overhead_of_overlapping_phases_is_not_negative() -> None:
    assert kernel_overhead(4.0, {"time/engine": 3.0, "time/forward_backward": 3.0}) == 0.0
