"""Of several parts in trouble, the watch over a run names the one that caused the rest."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from slime.config import RunConfig
from slime.errors import ClusterError, DeadlineError, EngineError, ProcessDiedError, SlimeError
from slime.registry.plugin_set import load_plugins
from slime.run import ray_session
from slime.run.run import Run
from slime.run.supervise import traces
from slime.run.supervise import watch as module
from slime.run.supervise.host_watch import WatchedProcess
from slime.run.supervise.losses import PartKind
from slime.run.supervise.watch import RunWatch

Sleeper = Callable[[str, PartKind], "subprocess.Popen[bytes]"]


@pytest.fixture
def watch() -> RunWatch:
    return RunWatch(20.0)


@pytest.fixture
def sleeper(watch: RunWatch) -> Iterator[Sleeper]:
    """Starts a process that the run watches under a name."""
    children: list[subprocess.Popen[bytes]] = []

    def start(name: str, kind: PartKind) -> subprocess.Popen[bytes]:
        children.append(subprocess.Popen(["sleep", "60"]))
        watch.add(WatchedProcess(name, kind, children[-1].pid))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()


def kill(*children: subprocess.Popen[bytes]) -> None:
    for child in children:
        child.kill()
        child.wait()


def test_nothing_is_wrong_with_processes_that_run(watch: RunWatch, sleeper: Sleeper) -> None:
    sleeper("trainer rank 0", "trainer")
    watch()
    assert watch.explain() is None


@pytest.mark.parametrize(
    ("kind", "error"),
    [("trainer", ProcessDiedError), ("rollout", ProcessDiedError), ("ray", ClusterError), ("router", EngineError)],
)
def test_a_dead_part_ends_the_wait(kind: PartKind, error: type[SlimeError], watch: RunWatch, sleeper: Sleeper) -> None:
    sleeper("another", "trainer")
    kill(sleeper("the part", kind))
    with pytest.raises(error, match=r"^the part \(pid \d+ on \S+\) has ended"):
        watch()


def test_what_can_be_restarted_is_handed_over_unless_another_part_is_in_trouble(
    watch: RunWatch, sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    lost: list[tuple[str, str]] = []
    watch.restart_with(lambda owner, why: lost.append((owner, why())))
    trainer = sleeper("trainer rank 0", "trainer")
    kill(sleeper("engine 1's scheduler", "engine"), sleeper("the router", "router"))
    watch()
    assert [owner for owner, _ in lost] == ["engine 1", "the router"]
    assert lost[0][1].startswith("engine 1's scheduler (pid ")
    watch.kill("engine 1")
    watch()
    assert [owner for owner, _ in lost] == ["engine 1", "the router", "the router"]
    kill(trainer)
    with pytest.raises(SlimeError, match="Also in trouble: the router"):
        watch()
    assert len(lost) == 3


def test_without_ray_the_others_end_too_so_ray_is_named(watch: RunWatch, sleeper: Sleeper) -> None:
    kill(sleeper("the rollout process", "rollout"), sleeper("trainer rank 0", "trainer"), sleeper("raylet", "ray"))
    cause = watch.explain()
    assert cause is not None and str(cause).startswith("raylet (pid")
    assert str(cause).endswith("Also in trouble: the rollout process, trainer rank 0.")


def test_engines_explain_only_what_they_can_cause(watch: RunWatch, sleeper: Sleeper) -> None:
    kill(sleeper("engine 1's scheduler", "engine"))
    assert watch.explain(engines=False) is None and isinstance(watch.explain(), EngineError)
    kill(sleeper("trainer rank 0", "trainer"))
    assert str(watch.explain(engines=False)).startswith("trainer rank 0 (pid")


def test_a_stopped_part_explains_an_error_at_once_but_ends_no_wait_yet(watch: RunWatch, sleeper: Sleeper) -> None:
    sleeper("trainer rank 0", "trainer").send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 50
    while (cause := watch.explain()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "trainer rank 0" in str(cause) and "is stopped" in str(cause)
    watch()


def test_an_agent_of_ray_takes_its_node_service_with_it_and_is_named(watch: RunWatch, sleeper: Sleeper) -> None:
    agent = "Ray's dashboard agent (ray::DashboardAgent)"
    kill(sleeper("rank", "trainer"), sleeper("Ray's node service (raylet)", "ray"), sleeper(agent, "ray"))
    cause = watch.explain(ray_alone=True)
    assert isinstance(cause, ClusterError) and str(cause).startswith(agent)
    assert "node service (raylet)" in str(cause) and "rank" not in str(cause)


def test_a_node_service_that_was_killed_is_named_also_if_its_agent_was_seen_first(
    watch: RunWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("raylet", "ray::RuntimeEnvAgent"):
        shutil.copy(shutil.which("bash") or "", tmp_path / name)
    words = [str(tmp_path / "raylet"), "-c", f"{tmp_path}/ray::RuntimeEnvAgent -c 'sleep 60; :' & sleep 60; :"]
    with subprocess.Popen(words, start_new_session=True) as raylet:
        monkeypatch.setattr(ray_session, "_daemons", lambda: iter([("raylet", raylet)]))
        monkeypatch.setattr(ray_session, "_last_words", lambda kind: f" Its log: {kind}.out")
        while not (agents := [p for p in psutil.Process(raylet.pid).children() if "Agent" in p.name()]):
            time.sleep(0.01)
        watch.add_ray()
        assert watch.explain() is None
        agents[0].kill()  # as the kernel does when its parent dies
        deadline = time.monotonic() + 50
        while (cause := watch.explain()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert str(cause).startswith("Ray's agent for runtime environments")
        raylet.kill()
        raylet.wait()
        cause = watch.explain()
        os.killpg(raylet.pid, signal.SIGKILL)
    assert str(cause) == f"Ray's node service (raylet) (pid {raylet.pid}) was killed by SIGKILL. Its log: raylet.out"


def test_only_the_end_of_ray_explains_what_already_has_a_name(watch: RunWatch, sleeper: Sleeper) -> None:
    kill(sleeper("trainer rank 0", "trainer"))
    assert watch.explain(ray_alone=True) is None


def test_only_a_stopped_ray_of_this_run_is_killed(watch: RunWatch, sleeper: Sleeper) -> None:
    # As another machine reports its own: a process of this one can have the same id.
    raylet = sleeper("Ray's node service (raylet)", "ray")
    raylet.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 50
    while watch.explain() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "is stopped" in str(watch.explain())
    assert raylet.poll() is None


def test_when_a_deadline_has_passed_every_process_shows_where_it_is(
    watch: RunWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "_STACK_S", 60.0)  # on a busy machine a process needs longer to write its stacks
    code = (
        "import faulthandler, signal, time\n"
        "faulthandler.register(signal.SIGUSR2)\n"
        "def dawdle():\n    print('begun', flush=True)\n    time.sleep(60)\n"
        "dawdle()\n"
    )
    logs = [tmp_path / "trainer-0.log", tmp_path / "trainer-1.log"]
    children = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            children.append(subprocess.Popen([sys.executable, "-c", code], stdout=out, stderr=out))
        watch.add(WatchedProcess(f"trainer rank {rank}", "trainer", children[-1].pid, log))
    try:
        deadline = time.monotonic() + 50
        while not all("begun" in log.read_text() for log in logs) and time.monotonic() < deadline:
            time.sleep(0.01)
        late = DeadlineError(f"training: 1 of 2 processes had not answered after 9 s: trainer rank 1 (log: {logs[1]}).")
        shown = watch.stacks(late)
    finally:
        kill(*children)
    assert shown.startswith(f"\ntrainer rank 1 (pid {children[1].pid}) is here:\n")
    assert shown.splitlines()[2].endswith("line 5 in dawdle")
    # The others after it: what it waits for may be one of them.
    assert f"\ntrainer rank 0 (pid {children[0].pid}) is here:\n" in shown


def test_what_a_supervisor_says_comes_first(watch: RunWatch, sleeper: Sleeper) -> None:
    def check() -> None:
        raise EngineError("engine 0: was killed by SIGKILL")

    watch.supervise(check)
    kill(sleeper("engine 0's scheduler", "engine"))
    with pytest.raises(EngineError, match="was killed by SIGKILL"):
        watch()


class FakeNode:
    """A node of Ray whose watch answers what a test says: nothing wrong, an error of Ray, or not at all."""

    def __init__(self, watch: RunWatch, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: Exception | str | None = "fine"
        self.alive, self.now = True, 0.0
        #: the parts that each watch started on it has been told of
        self.told: list[list[str]] = []
        monkeypatch.setattr(module, "LOOK_S", 0.0)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(watch, "_start_watch", lambda _: self.start())
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
        monkeypatch.setattr(
            ray, "nodes", lambda: [{"NodeID": "there", "NodeManagerAddress": "10.0.0.2", "Alive": self.alive}]
        )
        monkeypatch.setattr(ray, "wait", lambda asked, **_: ([] if self.answer is None else asked, []))
        monkeypatch.setattr(ray, "get", self.get)

    def start(self) -> Any:
        self.told.append(parts := [])
        remote = {"add": lambda part: parts.append(part.name), "look_and_describe": lambda *_: "asked"}
        return SimpleNamespace(
            **{name: SimpleNamespace(remote=call) for name, call in remote.items()},
            kill=SimpleNamespace(remote=lambda _: None),
        )

    def sleep(self, _: float) -> None:
        self.now += 1.0

    def get(self, _: object) -> Sequence[object]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return []


@pytest.fixture
def node(watch: RunWatch, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    made = FakeNode(watch, monkeypatch)
    for name in ("trainer rank 1", "engine 0's supervisor"):
        watch._watch_of("there", WatchedProcess(name, "engine" if "engine" in name else "trainer", 1))
    return made


def look(watch: RunWatch, node: FakeNode, after_s: float) -> None:
    node.now += after_s
    watch()


def test_a_node_whose_connection_breaks_for_a_moment_is_not_lost(watch: RunWatch, node: FakeNode) -> None:
    look(watch, node, 1)
    for _ in range(3):
        node.answer = ActorUnavailableError("broken", b"0" * 16)
        look(watch, node, 1)
        node.answer = "fine"
        look(watch, node, 9)
        look(watch, node, 9)
    node.answer = ActorUnavailableError("broken", b"0" * 16)
    look(watch, node, 1)
    node.answer = None
    look(watch, node, 2)
    with pytest.raises(ClusterError, match=r"^node 10\.0\.0\.2 has ended, or cannot.*had trainer rank 1, engine 0\.$"):
        look(watch, node, 2)


def test_an_error_is_explained_by_a_node_that_stays_silent_only(watch: RunWatch, node: FakeNode) -> None:
    node.answer = ActorUnavailableError("broken", b"0" * 16)
    assert str(watch.explain()).startswith("node 10.0.0.2 has ended")
    node.answer = "fine"
    assert watch.explain() is None


def test_a_watch_that_ends_alone_is_started_again(watch: RunWatch, node: FakeNode) -> None:
    watch.kill("engine 0")
    node.answer = ActorDiedError()
    look(watch, node, 1)
    assert node.told == [["trainer rank 1", "engine 0's supervisor"], ["trainer rank 1"]]
    node.alive = False
    with pytest.raises(ClusterError, match=r"^node 10\.0\.0\.2 has ended"):
        look(watch, node, 1)


def test_a_step_looks_at_the_processes_even_if_none_of_its_waits_is_long_enough_to(tmp_path: Path) -> None:
    config, observer = RunConfig(), cast("Any", SimpleNamespace())  # nothing is observed
    run: Any = Run(config, tmp_path, load_plugins(config.plugins), observer)
    ended = subprocess.Popen(["true"])
    ended.wait()
    run._watch.add(WatchedProcess("Ray's control service", "ray", ended.pid))
    with pytest.raises(ClusterError, match=r"^Ray's control service .* has ended"):
        run.start_step(0)
