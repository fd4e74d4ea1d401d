"""Rewards in real worker processes, with rewards that hang, die or return wrong answers on demand."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.support.bad_rewards import bad_rewards
from tests.support.distributions import Install, install

from slime.config import RunConfig
from slime.config.options import RewardOptions
from slime.errors import PluginError, SlimeError
from slime.kit.processes import WorkerPool, living_members
from slime.plugin import Reward
from slime.registry.resolve import Use
from slime.rollout.failures import Cause, Fault
from slime.rollout.scoring import IsolatedReward, Result, RewardJob
from slime.types import Sample, Status

__all__ = ["bad_rewards", "install"]

pytestmark = [pytest.mark.usefixtures("bad_rewards"), pytest.mark.slow]

T = TypeVar("T")
#: seconds for calls of which some hang; on a busy machine the others need some of them
SHORT_S = 1.5


def sample(label: str = "good", index: int = 1, response: str = "") -> Sample:
    return Sample(
        index=index, label=label, response=response, tokens=[1, 2], response_length=1, status=Status.COMPLETED
    )


def with_pool(
    run_dir: Path,
    work: Callable[[IsolatedReward], Awaitable[T]],
    name: str = "plain",
    *,
    timeout_s: float = 30.0,
    size: int = 1,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    """The result of `work` with a pool, checking that none of its processes is left afterwards."""
    job = RewardJob(RunConfig(reward=RewardOptions(reward=name)), Use("reward", "reward", name), run_dir)

    async def main() -> T:
        pool = IsolatedReward(job, "reward r", size=size, timeout_s=timeout_s, startup_timeout_s=60)
        await pool.start()
        pids: set[int] = set()

        async def note() -> None:
            while True:
                pids.update(pool.pool.pids)
                await asyncio.sleep(0.02)

        noting = asyncio.create_task(note())
        deadline = time.monotonic() + 60
        while not pids:  # a worker may be ready before its process id is known
            assert time.monotonic() < deadline, "no worker has a process id"
            await asyncio.sleep(0.01)
        try:
            return await work(pool)
        finally:
            await pool.close()
            noting.cancel()
            assert pids and [pid for pid in pids if living_members(pid)] == []

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


async def score(pool: IsolatedReward, samples: Sequence[Sample]) -> list[Result]:
    """The result for each sample, with one call for each, all at once."""
    answers = await asyncio.gather(*(pool.call([one]) for one in samples))
    return [result for results, _ in answers for result in results]


def score_in_pool(run_dir: Path, samples: Sequence[Sample], name: str = "plain", **more: Any) -> list[Result]:
    """Like `score`, with a separate pool."""
    return with_pool(run_dir, lambda pool: score(pool, samples), name, **more)


def values(results: Sequence[Result]) -> list[float | Cause]:
    return [result.cause if isinstance(result, Fault) else result.value for result in results]


@pytest.mark.parametrize("name", ["plain", "overlapping"])
def test_rewards_are_returned_with_parts_and_samples_stay_unchanged(name: str, tmp_path: Path) -> None:
    asked = [sample(index=n) for n in range(20)] + [sample("write", 20), sample("nan"), sample("chance")]
    found = score_in_pool(tmp_path, asked, name)
    assert found[:21] == [Reward(float(n), {"half": 0.5}) for n in range(21)]
    assert found[21] == Fault(Cause.CONTRACT, "reward r returned value = nan, expected a finite number")
    assert "seen" not in asked[20].metadata


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_answer_sent_before_the_worker_died_is_read_after_a_failed_write(loop: str, tmp_path: Path) -> None:
    async def work(pool: IsolatedReward) -> list[float | Cause]:
        await score(pool, [sample(), sample()])  # calls are short: the next ones are queued in the worker
        dead = asyncio.Event()

        async def late(index: int) -> list[Result]:
            await dead.wait()
            if index == 0:  # this process is busy while the worker answers the first call and dies in the second
                time.sleep(0.5)
            return (await pool.call([sample(index=index)]))[0]

        # Some of these calls are written before anything is read; the others wait for room in the worker.
        calls = [asyncio.create_task(late(index)) for index in range(30)]
        answered = asyncio.create_task(score(pool, [sample("nap", response="0.03"), sample("kill")]))
        await asyncio.sleep(0.01)
        dead.set()
        return values([*await answered, *(result for [result] in await asyncio.gather(*calls))])

    factory = pytest.importorskip("uvloop").new_event_loop if loop == "uvloop" else None
    found = with_pool(tmp_path, work, loop_factory=factory)
    assert found == [1.0, Cause.DIED, *map(float, range(30))]


@pytest.mark.parametrize("name", ["plain", "overlapping"])
def test_faulty_rewards_fail_only_their_samples_on_the_event_loop_of_ray_actors(name: str, tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")
    labels = {3: "spin", 7: "kill"}
    asked = [sample(labels.get(n, "good"), n) for n in range(12)]
    found = score_in_pool(tmp_path, asked, name, timeout_s=SHORT_S, loop_factory=uvloop.new_event_loop)
    assert values(found) == [{3: Cause.HUNG, 7: Cause.DIED}.get(n, float(n)) for n in range(12)]
    assert found[2] == Reward(2.0, {"half": 0.5})


def test_a_blocked_parent_is_not_mistaken_for_a_hanging_worker(tmp_path: Path) -> None:
    async def work(pool: IsolatedReward) -> int:
        answers = asyncio.ensure_future(score(pool, [sample()] * 40))
        await asyncio.sleep(0)
        time.sleep(SHORT_S + 1.4)  # the event loop of this process is blocked, past the deadline
        assert values(await answers) == [1.0] * 40
        return pool.restarts

    assert with_pool(tmp_path, work, timeout_s=SHORT_S) == 0


def test_a_stopped_worker_is_replaced_and_its_call_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.kit.processes.pool.STOPPED_S", 0.3)

    async def work(pool: IsolatedReward) -> list[Result]:
        assert values(await score(pool, [sample()])) == [1.0]
        os.kill(pool.pool.pids[0], signal.SIGSTOP)
        async with asyncio.timeout(45):  # the deadline of a call is longer
            return await score(pool, [sample()] * 3)

    assert values(with_pool(tmp_path, work, timeout_s=100.0)) == [1.0] * 3


def test_calls_are_spread_over_worker_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.kit.processes.pool.SLOW_S", 30.0)  # or a third worker is started beside these two

    async def work(pool: IsolatedReward) -> set[float | Cause]:
        while sum(worker.ready for worker in pool.pool._workers.values()) < 2:
            await asyncio.sleep(0.02)
        naps = asyncio.gather(*(pool.call([sample("nap", response="2.0")]) for _ in range(2)))
        while [len(worker.calls) for worker in pool.pool._workers.values()] != [1, 1]:
            assert not naps.done(), "one process made both calls"
            await asyncio.sleep(0.02)
        await naps
        return set(values(await score(pool, [sample("pid")] * 40)))

    assert len(with_pool(tmp_path, work, size=2)) == 2


@pytest.mark.parametrize("name", ["plain", "overlapping"])
def test_calls_that_hang_fail_only_their_samples(name: str, tmp_path: Path) -> None:
    labels = {3: "spin", 7: "sleep"}
    found = score_in_pool(tmp_path, [sample(labels.get(n, "good"), n) for n in range(12)], name, timeout_s=SHORT_S)
    assert values(found) == [Cause.HUNG if n in labels else float(n) for n in range(12)]
    assert found[3] == Fault(Cause.HUNG, f"reward r: no score after {SHORT_S:g} s (timeout_s)")
    log = (tmp_path / "logs" / "reward-0.log").read_text() + (tmp_path / "logs" / "reward-1.log").read_text()
    assert "in act" in log  # where it hung


@pytest.mark.parametrize("name", ["plain", "overlapping"])
def test_rewards_that_exit_fail_only_their_samples(name: str, tmp_path: Path) -> None:
    ends = {
        3: ("exit", "ended with exit code 3"),
        6: ("kill", "was killed by SIGKILL"),
        7: ("segfault", "was killed by SIGSEGV"),
    }
    found = score_in_pool(tmp_path, [sample(ends[n][0] if n in ends else "good", n) for n in range(12)], name)
    assert values(found) == [Cause.DIED if n in ends else float(n) for n in range(12)]
    for n, (_, how) in ends.items():
        reason = f"reward r: its worker process {how} while it scored the sample"
        assert found[n] == Fault(Cause.DIED, reason)


@pytest.mark.parametrize("name", ["plain", "overlapping"])
def test_an_exception_or_an_unusable_answer_leaves_the_process_alive(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.kit.processes.pool.SLOW_S", 30.0)  # or a busy machine replaces the process as too slow
    expected = {
        "raise": Fault(Cause.RAISED, f"reward r: {tmp_path}/site/bad_rewards.py:28: ValueError: no verdict"),
        "sys.exit": Fault(Cause.RAISED, f"reward r: {tmp_path}/site/bad_rewards.py:21: SystemExit: 3"),
    }
    if name == "plain":
        expected |= {
            "too few": Fault(Cause.CONTRACT, "reward r returned 0 rewards for 1 samples, expected one each"),
            "wrong type": Fault(Cause.CONTRACT, "reward r returned a str, expected a list of Reward"),
        }

    async def work(pool: IsolatedReward) -> None:
        before = await score(pool, [sample("pid")])
        found = [result for label in expected for result in await score(pool, [sample(label)])]
        assert found == list(expected.values())
        assert values(before) == values(await score(pool, [sample("pid")]))
        assert pool.restarts == 0

    with_pool(tmp_path, work, name)


def test_overdue_overlapping_calls_are_cancelled_and_their_process_continues(tmp_path: Path) -> None:
    async def work(pool: IsolatedReward) -> list[float | Cause]:
        labels = ["wait", "wait", "stubborn"]
        waits = asyncio.ensure_future(score(pool, [sample(label) for label in labels]))
        others = [value for n in range(3) for value in values(await score(pool, [sample(index=n)]))]
        found = values(await waits) + others
        assert pool.restarts == 0
        return found

    found = with_pool(tmp_path, work, "overlapping", timeout_s=SHORT_S)
    assert found == [Cause.HUNG] * 3 + [0.0, 1.0, 2.0]


def test_a_worker_with_many_overdue_calls_is_replaced(tmp_path: Path) -> None:
    async def work(pool: IsolatedReward) -> int:
        await asyncio.gather(*(pool.call([sample("wait")]) for _ in range(8)))
        assert values(await score(pool, [sample()])) == [1.0]
        while not pool.restarts:  # the old one has had its last answer, and leaves by itself
            await asyncio.sleep(0.02)
        return pool.restarts

    assert with_pool(tmp_path, work, "overlapping", timeout_s=SHORT_S) == 1


def test_a_healthy_worker_that_was_slow_once_is_no_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(pool: IsolatedReward) -> int:
        await asyncio.gather(*(pool.call([sample()]) for _ in range(50)))  # calls are known to be short
        monkeypatch.setattr("slime.kit.processes.pool.SLOW_S", 0.05)
        before = set(pool.pool.pids)
        assert values(await score(pool, [sample("nap", response="1.5")])) == [1.0]
        async with asyncio.timeout(45):
            while before <= set(pool.pool.pids):  # one leaves, because another has taken its place
                await asyncio.sleep(0.02)
        assert values(await score(pool, [sample()])) == [1.0]
        return pool.restarts

    assert with_pool(tmp_path, work) == 0


def test_overlapping_calls_are_not_timed_out_by_each_others_computing(tmp_path: Path) -> None:
    # twenty calls of eight times 0.02 s in one event loop take 3.2 s in total, 0.16 s each
    found = score_in_pool(tmp_path, [sample("compute", response="0.02")] * 20, "overlapping", timeout_s=2.0)
    assert values(found) == [1.0] * 20


def test_calls_overlap(tmp_path: Path) -> None:
    async def work(pool: IsolatedReward) -> float:
        started = time.monotonic()
        await asyncio.gather(*(pool.call([sample("nap", response="1")]) for _ in range(50)))
        return time.monotonic() - started

    assert with_pool(tmp_path, work, "overlapping") < 40  # one after the other: 50 s


def test_if_the_responsible_call_is_unknown_each_is_repeated_alone(tmp_path: Path) -> None:
    asked = [sample("thread exit" if n == 2 else "nap", n, response="0.3") for n in range(5)]
    found = score_in_pool(tmp_path, asked, "overlapping", size=2)
    assert values(found) == [Cause.DIED if n == 2 else 1.0 for n in range(5)]


def test_queued_calls_do_not_wait_for_a_hanging_one(tmp_path: Path) -> None:
    async def work(pool: IsolatedReward) -> float:
        await asyncio.gather(*(pool.call([sample()]) for _ in range(50)))  # calls are known to be short
        hanging = asyncio.create_task(pool.call([sample("sleep")]))
        await asyncio.sleep(0)
        started = time.monotonic()
        await asyncio.gather(*(pool.call([sample()]) for _ in range(50)))
        took = time.monotonic() - started
        hanging.cancel()
        return took

    assert with_pool(tmp_path, work, timeout_s=60) < 20  # of 60 s that the only worker is taken


def test_cancelled_calls_do_not_occupy_the_worker(tmp_path: Path) -> None:
    async def work(pool: IsolatedReward) -> list[float | Cause]:
        waits = [asyncio.create_task(pool.call([sample("wait")])) for _ in range(3)]
        while sum(len(worker.calls) for worker in pool.pool._workers.values()) < 3:
            await asyncio.sleep(0.01)
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)
        return values(await score(pool, [sample()]))

    assert with_pool(tmp_path, work, "overlapping") == [1.0]


def test_processes_that_a_reward_started_end_with_its_worker(tmp_path: Path) -> None:
    asked = [sample("child"), sample("spin")]
    found = score_in_pool(tmp_path, asked, timeout_s=SHORT_S)  # looks for the child
    assert values(found) == [1.0, Cause.HUNG]


def test_output_goes_to_the_log_and_an_unpicklable_sample_fails(tmp_path: Path) -> None:
    unsendable = sample()
    unsendable.metadata["callback"] = lambda: None
    found = score_in_pool(tmp_path, [unsendable, sample("print")])
    assert values(found) == [Cause.RAISED, 1.0]
    fault = found[0]
    assert isinstance(fault, Fault) and "cannot be sent to a worker process" in fault.reason
    assert "a word from the reward" in (tmp_path / "logs" / "reward-0.log").read_text()


def test_a_reward_that_cannot_be_built_is_refused_at_the_start(tmp_path: Path) -> None:
    async def work(_: IsolatedReward) -> None:
        raise AssertionError("unreachable")

    with pytest.raises(
        PluginError,
        match=r"bad/unbuildable \(bad-rewards 1.0\) cannot be built: .*bad_rewards.py:85: Runtime",
    ):
        with_pool(tmp_path, work, "unbuildable")


def test_a_reward_whose_import_starts_threads_runs_in_processes_that_are_not_forked(
    install: Install, tmp_path: Path
) -> None:
    source = """
        import os, threading, time
        import slime.plugin as sp
        slime_api = 1
        threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()

        class Threads:
            def __init__(self, options, context):
                pass

            def score(self, samples):
                return [sp.Reward(float(threading.active_count())) for _ in samples]

        @sp.hookimpl
        def slime_register_rewards():
            return [sp.RewardSpec(name="threads", factory=f"{__name__}:Threads")]
        """
    install("threads", "1.0", {"threads": "threads"}, {"threads": source})
    # the import in the worker itself starts the one thread beside the main one; a fork would have none
    assert values(score_in_pool(tmp_path, [sample()], "threads/threads")) == [2.0]


def test_an_error_in_the_pool_itself_is_raised_and_leaves_no_caller_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_self: WorkerPool, _worker: object) -> None:
        raise RuntimeError("a mistake of ours")

    async def work(pool: IsolatedReward) -> str:
        monkeypatch.setattr(WorkerPool, "_check", broken)
        with pytest.raises(SlimeError) as caught:
            while True:
                await pool.call([sample()])
        return str(caught.value)

    message = with_pool(tmp_path, work)
    assert "the worker pool of reward r failed: RuntimeError: a mistake of ours" in message
