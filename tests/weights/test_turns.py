"""The turns in which the senders of pipeline stages send, without engines."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from slime.errors import WeightSyncError
from slime.weights.transports import stages
from slime.weights.transports.stages import Turns, stage_metrics


def of_stages(count: int) -> list[Turns]:
    store = HashStore()
    return [Turns(store, stage, count) for stage in range(count)]


def soon() -> float:
    return time.monotonic() + 30


def test_each_sender_begins_when_the_one_before_has_ended_and_none_goes_on_without_the_first() -> None:
    turns, order = of_stages(3), list[int]()

    def part(own: Turns, seconds: float) -> float:
        with own.sync():
            deadline, _ = own.wait(time.monotonic() + seconds)
            order.append(own.stage)
            time.sleep(0.05)
            order.append(own.stage)
            own.done(sent=own.stage, seconds=1.0, report=[own.stage])
        return deadline

    for _ in range(2):
        order.clear()
        with ThreadPoolExecutor() as pool:
            late = [pool.submit(part, own, 900.0) for own in turns[:0:-1]]
            began = time.monotonic()
            with turns[0].sync():
                order.extend([0, 0])
                reports = turns[0].others(began + 60)
            assert order == [0, 0, 1, 1, 2, 2]
            assert {stage: (one["sent"], one["report"]) for stage, one in reports.items()} == {1: (1, [1]), 2: (2, [2])}
            # A sender that started its call later must not send when the first has given up.
            assert all(one.result() < began + 61 for one in late)


def test_senders_that_begin_together_send_at_the_same_time_in_every_sync() -> None:
    turns, both = of_stages(3), Barrier(2)

    def part(own: Turns) -> None:
        with own.sync():
            own.wait(soon())
            both.wait(30)  # in turns, the second would not come
            own.done(sent=own.stage, seconds=1.0)

    for _ in range(2):
        with ThreadPoolExecutor() as pool:
            parts = [pool.submit(part, own) for own in turns[1:]]
            with turns[0].sync():
                turns[0].begin_together(soon())
                reports = turns[0].others(soon())
            assert {stage: one["sent"] for stage, one in reports.items()} == {1: 1, 2: 2}
            for one in parts:
                one.result()


@pytest.mark.slow
def test_a_sender_that_is_late_does_not_think_that_the_first_has_waited_for_it() -> None:
    first, second = of_stages(2)
    with ThreadPoolExecutor() as pool, first.sync():
        deadline = time.monotonic() + 60
        others = pool.submit(first.others, deadline)
        time.sleep(3)  # it gathers its first tensors
        with second.sync():
            assert second.wait(time.monotonic() + 900)[0] < deadline + 1
            second.done(sent=1, seconds=1.0)
        assert others.result()[1]["sent"] == 1


def test_what_fails_before_a_sender_could_send_is_told_and_the_next_sync_is_another() -> None:
    first, second = of_stages(2)
    for count in range(2):
        with pytest.raises(WeightSyncError, match=f"stage 1 failed: OSError: no network {count}"), first.sync():
            with pytest.raises(OSError, match="no network"), second.sync():
                raise OSError(f"no network {count}")
            first.others(soon())
    with ThreadPoolExecutor() as pool, first.sync(), second.sync():
        others = pool.submit(first.others, soon())
        second.wait(soon())
        second.done(sent=7, seconds=1.0)
        assert others.result()[1]["sent"] == 7


def test_what_fails_at_the_first_while_others_send_is_told_to_those_that_wait(caplog: pytest.LogCaptureFixture) -> None:
    turns = of_stages(3)
    with pytest.raises(WeightSyncError, match="stage 1 failed: MemoryError: no memory left"), turns[0].sync():
        with pytest.raises(MemoryError), turns[1].sync():
            raise MemoryError("no memory left")
        turns[0].others(soon())
    with turns[2].sync():
        turns[2].wait(soon())
        pytest.fail("it may not send")
    assert "stage 0 failed: the sender of pipeline stage 1 failed: MemoryError: no memory left" in caplog.text


def test_all_senders_hear_of_the_first_failure(caplog: pytest.LogCaptureFixture) -> None:
    turns = of_stages(3)
    refusal = WeightSyncError("Weight sync: pausing failed at engine http://a", ["http://a"])
    with pytest.raises(WeightSyncError), turns[0].sync():
        raise refusal
    for own in turns[1:]:
        caplog.clear()
        with (
            own.sync(),
            pytest.raises(WeightSyncError, match="stage 0 failed: pausing failed at engine http://a") as caught,
        ):
            own.wait(soon())
        assert caught.value.urls == ["http://a"]


def test_a_sender_that_says_nothing_is_named_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "LAST_WORDS_S", 0.0)
    first, second = of_stages(2)
    with pytest.raises(WeightSyncError, match="stage 1 did not send its part in time"), first.sync():
        first.others(time.monotonic() + 0.05)
    first, second = of_stages(2)
    with second.sync(), pytest.raises(WeightSyncError, match="stage 0 did not let stage 1 send in time"):
        second.wait(time.monotonic() + 0.05)


def test_a_report_larger_than_a_value_of_the_store_arrives() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own = [TCPStore("127.0.0.1", store.port, wait_for_workers=False) for _ in range(2)]
    first, second = (Turns(own[stage], stage, 2) for stage in range(2))
    report = {"missing": [f"model.layers.{number}.name" for number in range(400_000)]}
    for _ in range(2):
        with ThreadPoolExecutor() as pool, first.sync(), second.sync():
            others = pool.submit(first.others, soon())
            second.wait(soon())
            second.done(sent=1, seconds=1.0, report=report)
            assert others.result()[1]["report"] == report
    kept = store.num_keys()
    with first.sync(), second.sync():
        pass
    assert store.num_keys() < kept - 3  # what was read is not kept


def test_the_slowest_stage_is_the_one_of_the_lowest_rate() -> None:
    found = stage_metrics({0: (4_000_000_000, 2.0), 1: (1_000_000_000, 1.0)})
    assert found == {
        "perf/sync/stage0_bytes": 4e9,
        "perf/sync/stage0_seconds": 2.0,
        "perf/sync/stage0_gb_per_s": 2.0,
        "perf/sync/stage1_bytes": 1e9,
        "perf/sync/stage1_seconds": 1.0,
        "perf/sync/stage1_gb_per_s": 1.0,
        "perf/sync/slowest_stage": 1.0,
    }
