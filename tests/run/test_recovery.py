"""Engines and the router that are lost are restarted within the budget; weights reach an engine before requests do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from slime.config import RunConfig
from slime.config.options import ClusterOptions
from slime.errors import (
    CheckpointError,
    ClusterError,
    DeadlineError,
    EngineError,
    EngineStartError,
    ErrorBudgetError,
    PluginError,
    ProcessDiedError,
    SlimeError,
    UnexpectedError,
    WeightSyncError,
)
from slime.run.engines import ROUTER
from slime.run.rollout_process import RolloutProcess
from slime.run.supervise import recovery
from slime.run.supervise.losses import is_curable
from slime.run.supervise.recovery import Recovery

URLS = ["http://a", "http://b"]


class Call:
    """A stand-in for a call to a process, which finishes when told."""

    timeout_s = 60.0

    def __init__(self, error: SlimeError | None = None, *, finished: bool = True, result: Any = None) -> None:
        self.error, self.finished, self.result = error, finished, result

    def wait(self) -> list[Any]:
        if self.error is not None:
            raise self.error
        return [self.result]


class FaultyEngines:
    """Fault injection: a stand-in for the engines and the router, which end when a test says so."""

    url = "http://router"

    def __init__(self) -> None:
        self.urls = list(URLS)
        self.events: list[str] = []
        self.routed = list(URLS)
        self.ended: list[tuple[str, SlimeError]] = []
        #: how the next starts end
        self.starts: list[Call] = []
        self.router_answers = True
        self.deaf: EngineError | None = None
        #: the nodes that have left the cluster, by engine
        self.left: dict[int, str] = {}

    def node_left(self, index: int) -> str | None:
        return self.left.get(index)

    def lost(self) -> list[tuple[str, SlimeError]]:
        ended, self.ended = self.ended, []
        return ended

    def begin_end(self, index: int) -> Call:
        self.events.append(f"end {index}")
        return Call()

    def begin_start(self, index: int) -> Call:
        self.events.append(f"start {index}")
        return self.starts.pop(0) if self.starts else Call()

    def started(self, index: int) -> None:
        self.events.append(f"started {index}")

    def route(self, urls: Sequence[str]) -> None:
        if self.deaf is not None:
            raise self.deaf
        self.routed = list(urls)

    def restart_router(self, urls: Sequence[str]) -> None:
        self.deaf, self.routed = None, list(urls)
        self.events.append("restart router")

    def router_ready(self) -> bool:
        return self.router_answers


class Rollouts:
    """A stand-in for the rollout process."""

    def __init__(self) -> None:
        self.connected = list(URLS)
        self.answering_garbage: list[str] = []

    def begin(self, method: object, *arguments: Any, **_: Any) -> Call:
        if method == RolloutProcess.engines_answering_garbage:
            return Call(result=self.answering_garbage)
        url, urls = arguments
        assert (method, url) == (RolloutProcess.connect, FaultyEngines.url)
        self.connected = list(urls)
        return Call(result=2)


class Watch:
    """A stand-in for the watch of a run, which looks when called."""

    def __init__(self) -> None:
        self.checks: list[Callable[[], None]] = []
        self.restart: Any = None
        #: the deaths of an engine and of a rank, once noticed
        self.engine: SlimeError | None = None
        self.rank: SlimeError | None = None

    def supervise(self, check: Callable[[], None]) -> None:
        self.checks.append(check)

    def restart_with(self, restart: Any) -> None:
        self.restart = restart

    def explain(self, *, engines: bool = True, ray_alone: bool = False) -> SlimeError | None:  # noqa: ARG002 - the watch's
        return self.engine if engines and self.engine is not None else self.rank

    def stacks(self, error: DeadlineError) -> str:
        return f"\nwhere they were: {error}"

    def __call__(self) -> None:
        for check in self.checks:
            check()


class Told:
    """A stand-in for the observer: what it was told."""

    def __init__(self) -> None:
        self.restarts: Counter[str] = Counter()
        self.lost: list[str] = []
        self.back: list[tuple[str, int]] = []

    def ending(self, error: SlimeError) -> None:
        self.lost.append(f"the run: {error}")

    def part_lost(self, kind: str, part: str, how: str) -> None:
        self.restarts[kind] += 1
        self.lost.append(f"{part}: {how}")

    def part_dropped(self, part: str, how: str) -> None:
        self.lost.append(f"without {part}: {how}")

    def part_back(self, part: str, seconds: float, repeated: int) -> None:
        assert seconds >= 0
        self.back.append((part, repeated))


class Bench:
    """A recovery among stand-ins."""

    def __init__(
        self, *, tolerant: bool = True, max_restarts: int = 3, trains: bool = True, external: bool = False
    ) -> None:
        addresses = [url.removeprefix("http://") for url in URLS] if external else []
        config = RunConfig(
            cluster=ClusterOptions(
                use_fault_tolerance=tolerant, max_restarts=max_restarts, rollout_external_engine_addrs=addresses
            )
        )
        self.engines, self.rollouts, self.watch, self.told = FaultyEngines(), Rollouts(), Watch(), Told()
        parts: Any = self.engines, self.watch, self.rollouts, self.told
        self.recovery = Recovery(config, *parts, trains=trains)
        self.recovery.begin()

    def end(self, owner: str, error: SlimeError | None = None) -> None:
        """A part ends, and the watch looks until it is noticed, ended and started again."""
        self.engines.ended.append((owner, error or EngineError(f"{owner} was killed\nlast lines")))
        for _ in range(3):
            self.watch()

    def sync(self, send: Callable[[list[str], int], None] | None = None) -> list[list[str]]:
        """The engines that each attempt to send weights reaches."""
        reached: list[list[str]] = []

        def sent(urls: list[str], restarts: int) -> None:
            reached.append(urls)
            if send is not None:
                send(urls, restarts)

        self.recovery.sync(sent)
        return reached


def test_an_engine_that_was_restarted_gets_requests_only_after_weights() -> None:
    bench = Bench()
    bench.end("engine 1")
    assert bench.engines.events == ["end 1", "start 1", "started 1"]
    assert bench.engines.routed == bench.rollouts.connected == ["http://a"]
    assert bench.recovery.waiting and bench.told.back == []
    seen: list[tuple[list[str], int]] = []
    bench.sync(lambda _, restarts: seen.append((list(bench.engines.routed), restarts)))
    assert seen == [(["http://a"], 1)]  # it has no requests during the sync, and the ranks know that it is a new one
    assert bench.engines.routed == bench.rollouts.connected == URLS
    assert bench.told.back == [("engine 1", 4)] and not bench.recovery.waiting
    assert bench.told.lost == ["engine 1: engine 1 was killed\nlast lines"]


def test_without_a_trainer_it_gets_requests_at_once() -> None:
    bench = Bench(trains=False)
    bench.end("engine 0")
    assert bench.engines.routed == URLS and bench.told.back == [("engine 0", 4)]


def test_what_is_lost_is_restarted_once_however_often_it_is_reported() -> None:
    bench = Bench()
    bench.engines.starts = [Call(finished=False)]
    bench.end("engine 1")
    bench.end("engine 1")
    bench.watch.restart("engine 1", lambda: "engine 1's detokenizer has ended")
    assert bench.engines.events == ["end 1", "start 1"] and bench.told.restarts == {"engine": 1}


@pytest.mark.parametrize(("tolerant", "budget"), [(False, 3), (True, 0)], ids=["off", "no budget"])
def test_without_fault_tolerance_or_restarts_left_the_error_is_raised(tolerant: bool, budget: int) -> None:
    bench = Bench(tolerant=tolerant, max_restarts=budget)
    with pytest.raises(EngineError, match=r"^engine 1 was killed\nlast lines") as caught:
        bench.end("engine 1")
    assert ("0 of 0 restarts (--max-restarts) are used up" in str(caught.value)) == tolerant
    assert bench.engines.events == [] and bench.engines.routed == URLS


def test_engines_and_router_share_the_budget() -> None:
    bench = Bench(max_restarts=2)
    bench.end("engine 1")
    bench.end(ROUTER)
    with pytest.raises(EngineError, match=r"2 of 2 restarts \(--max-restarts\) are used up"):
        bench.end("engine 0")


def test_an_engine_that_does_not_start_is_tried_again_and_then_its_error_ends_the_run() -> None:
    bench = Bench(max_restarts=2)
    bench.engines.starts = [Call(EngineStartError("port taken")) for _ in range(2)]
    with pytest.raises(EngineStartError, match=r"^port taken\n"):
        for _ in range(3):
            bench.end("engine 0")
    assert bench.engines.events == ["end 0", "start 0"] * 2


def test_an_engine_whose_node_has_left_is_not_started_there_but_the_whole_run_is_elsewhere() -> None:
    bench = Bench()
    bench.engines.left[1] = "10.0.0.2"
    with pytest.raises(ClusterError, match=r"engine 1's node 10\.0\.0\.2 has left .*\nengine 1 was killed") as caught:
        bench.end("engine 1")
    assert is_curable(caught.value, first=True)
    assert not bench.told.restarts and not bench.engines.events


def test_a_node_that_is_missed_while_its_engine_is_being_started_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_NODE_S", 0.0)
    bench = Bench()
    bench.engines.starts = [Call(finished=False)]
    bench.end("engine 1")  # the cluster has not noticed yet that its node is gone
    assert bench.engines.events == ["end 1", "start 1"]
    bench.engines.left[1] = "10.0.0.2"
    with pytest.raises(ClusterError, match=r"engine 1's node 10\.0\.0\.2 has left"):
        bench.watch()


def test_the_router_is_restarted_in_front_of_the_engines_that_serve() -> None:
    bench = Bench()
    bench.engines.starts = [Call(finished=False)]
    bench.end("engine 0")
    bench.engines.router_answers = False
    bench.end(ROUTER)
    assert bench.engines.events[-1] == "restart router" and bench.engines.routed == ["http://b"]
    assert bench.told.back == []
    bench.engines.router_answers = True
    bench.watch()
    assert bench.told.back == [(ROUTER, 4)] and bench.rollouts.connected == ["http://b"]


def test_a_router_that_cannot_be_told_is_restarted() -> None:
    bench = Bench()
    bench.engines.deaf = EngineError("the router did not change its list")
    bench.end("engine 0")
    assert "restart router" in bench.engines.events and bench.engines.routed == ["http://b"]
    assert bench.told.restarts == {"engine": 1, "router": 1}


def test_an_engine_that_answers_with_garbage_is_restarted() -> None:
    bench = Bench()
    bench.rollouts.answering_garbage = ["http://b"]
    bench.watch()
    bench.rollouts.answering_garbage = []
    bench.watch()
    assert bench.engines.events[0] == "end 1"
    assert bench.told.lost == ["engine 1: engine 1 at http://b answers requests with something else than a response"]


def test_a_sync_during_which_an_engine_is_lost_is_repeated() -> None:
    bench = Bench()

    def send(urls: list[str], restarts: int) -> None:
        if restarts == 0 and len(urls) == 2:
            bench.end("engine 1")
            raise WeightSyncError("the connection was lost")

    # By the second time it runs again.
    assert bench.sync(send) == [URLS, URLS]
    assert bench.told.back == [("engine 1", 4)]


def test_a_sync_that_reached_an_engine_before_its_restart_does_not_put_it_into_service() -> None:
    bench = Bench()
    bench.sync(lambda *_: bench.end("engine 1"))
    assert bench.engines.routed == ["http://a"] and bench.recovery.waiting
    bench.sync()
    assert bench.engines.routed == URLS


def test_a_sync_that_fails_by_itself_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_NOTICED_S", 0.0)
    bench = Bench()

    def send(*_: Any) -> None:
        raise WeightSyncError("wrong shape")

    with pytest.raises(WeightSyncError, match="wrong shape"):
        bench.sync(send)


def test_an_engine_that_does_not_take_weights_is_restarted_though_nothing_else_is_wrong_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "_NOTICED_S", 0.0)
    bench = Bench()

    def send(urls: list[str], restarts: int) -> None:
        if restarts == 0 and len(urls) == 2:
            raise WeightSyncError("loading did not finish in time at http://b", ["http://b"])

    assert bench.sync(send) == [URLS, ["http://a"]]
    assert bench.engines.events == ["end 1"]
    assert bench.told.lost == ["engine 1: loading did not finish in time at http://b"]
    for _ in range(3):
        bench.watch()
    assert bench.sync() == [URLS] and bench.told.back == [("engine 1", 4)]


@pytest.mark.slow
def test_engines_that_never_take_weights_use_up_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_NOTICED_S", 0.0)
    bench = Bench(max_restarts=4)

    def send(urls: list[str], _: int) -> None:
        raise WeightSyncError("no answer", urls)

    with pytest.raises(WeightSyncError, match=r"^no answer\n.*4 of 4 restarts"):
        bench.sync(send)


@pytest.mark.parametrize(
    ("error", "off", "on"),
    [
        (PluginError("the filter raises"), True, False),
        (ErrorBudgetError("all samples failed"), True, False),
        (UnexpectedError("training: connection closed by peer"), True, True),
        (DeadlineError("generating: no answer"), True, True),
    ],
)
def test_what_a_lost_engine_cannot_cause_is_not_blamed_on_it_while_it_is_restarted(
    error: SlimeError, off: bool, on: bool
) -> None:
    assert Bench(tolerant=False).recovery.may_be_of_engine(error) == off
    assert Bench(tolerant=True).recovery.may_be_of_engine(error) == on


@pytest.mark.parametrize("tolerant", [True, False])
def test_the_death_of_a_rank_explains_every_error(tolerant: bool) -> None:
    """The others' collective operations fail, which they report as the failure of what they were doing."""
    bench = Bench(tolerant=tolerant)
    bench.watch.rank = ProcessDiedError("trainer rank 1 (pid 7) died")
    with pytest.raises(ProcessDiedError, match="rank 1"):
        bench.recovery.blame_first_cause(CheckpointError("the state could not be written: connection closed by peer"))
    assert bench.told.lost == ["the run: trainer rank 1 (pid 7) died"]


def test_a_stopped_rank_explains_a_deadline_that_names_it_or_another() -> None:
    for late in ("trainer rank 1", "trainer rank 10"):
        bench = Bench()
        bench.watch.rank = ProcessDiedError("trainer rank 1 (pid 7 on host) is stopped (SIGSTOP).")
        with pytest.raises(ProcessDiedError, match="is stopped") as caught:
            bench.recovery.blame_first_cause(DeadlineError(f"training: no answer after 9 s: {late} (log: a.log)."))
        assert late in caught.value.__notes__[0]


def test_a_daemon_of_ray_that_was_stopped_is_not_said_to_be_killed_since_the_watch_did_that() -> None:
    bench = Bench()
    bench.watch.rank = ClusterError("Ray's control service (gcs_server) (pid 7) was killed by SIGKILL.")
    bench.recovery.blame_first_cause(ClusterError("Ray's control service (gcs_server) (pid 7 on host) is stopped."))


def test_what_the_watch_has_raised_is_not_raised_from_itself() -> None:
    bench = Bench(tolerant=False)
    bench.watch.engine = EngineError("engine 1's scheduler (pid 7 on host) has not moved for 31 s.")
    bench.recovery.blame_first_cause(EngineError("engine 1's scheduler (pid 7 on host) has not moved for 30 s."))


def test_the_restart_of_an_engine_does_not_hide_the_error_of_a_plugin() -> None:
    bench = Bench()
    bench.watch.engine = EngineError("engine 1's scheduler (pid 7) has ended")
    bench.recovery.blame_first_cause(PluginError("the filter raises"))
    assert bench.told.lost == ["the run: the filter raises"]
    with pytest.raises(EngineError, match="scheduler"):
        bench.recovery.blame_first_cause(UnexpectedError("generating: connection closed by peer"))


# --- engines that somebody else started --------------------------------------------------------------


@pytest.mark.row("N9")
def test_an_external_engine_that_is_lost_is_dropped_and_never_started_again() -> None:
    bench = Bench(external=True, max_restarts=0)
    bench.end("engine 0")
    assert bench.engines.events == ["end 0"]
    assert bench.engines.routed == bench.rollouts.connected == ["http://b"]
    (told,) = bench.told.lost
    assert told.startswith("without engine 0: engine 0 was killed\nlast lines\nIt may still be paused, with a part of")
    assert bench.sync() == [["http://b"]]


@pytest.mark.row("N9")
def test_the_run_ends_when_the_last_external_engine_is_lost_and_names_it() -> None:
    bench = Bench(external=True)
    bench.end("engine 1")
    with pytest.raises(EngineError, match=r"engine 0 was killed[\s\S]*last engine of --rollout-external-engine-addrs"):
        bench.end("engine 0")


@pytest.mark.row("N9")
def test_an_external_engine_that_leaves_in_a_sync_is_dropped_and_the_others_get_the_weights_again() -> None:
    bench = Bench(external=True)
    failed: list[list[str]] = []

    def send(urls: list[str], _: int) -> None:
        if not failed:
            failed.append(urls)
            bench.engines.ended.append(("engine 0", EngineError("the external engine at http://a is gone")))
            raise WeightSyncError("Weight sync: receiving weights failed at engine http://a", ["http://a"])

    assert bench.sync(send) == [URLS, ["http://b"]]
    assert bench.engines.routed == ["http://b"]
