"""The watch over a whole run: every wait of the driver calls it, and it ends the wait if a part has died or hangs.

The driver looks at the processes of its own machine itself, and asks an actor on every other machine. Of several parts
in trouble it names the one that most likely caused the rest: a rank whose neighbour was killed fails as well, with an
error about its connection.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.errors import ClusterError, DeadlineError, SlimeError
from slime.run.ray_session import RAY_DAEMONS, ray_failure
from slime.run.supervise.host_watch import HostWatch, Trouble, WatchedProcess
from slime.run.supervise.losses import LOSSES, RESTARTED_ALONE, PartKind

logger = logging.getLogger(__name__)

#: seconds between two looks
LOOK_S = 0.5
#: seconds that the watch on another machine has to answer when an error is to be explained
_ANSWER_S = 3.0
#: seconds without an answer, after the connection to a node was lost, that make it a lost node
_SILENT_S = 3.0
#: seconds that the watches on other machines have to find out where their processes are
_STACKS_S = 15.0
#: a stopped or dead part explains a hung one
_TROUBLES = ("ended", "stopped", "hung")
_NAMES = {"trainer": "trainer rank {}", "engine": "engine {}'s supervisor", "rollout": "the rollout process"}
#: what a node service starts, and does not outlive: when one of them ends, it ends at once with all of its workers
_RAY_AGENTS = {
    "ray::DashboardAgent": "Ray's dashboard agent (ray::DashboardAgent)",
    "ray::RuntimeEnvAgent": "Ray's agent for runtime environments (ray::RuntimeEnvAgent)",
}


@dataclass
class _Node:
    """Another machine with processes of the run."""

    #: Ray's id of it
    id: str
    address: str
    #: what watches there
    actor: Any
    parts: list[WatchedProcess] = field(default_factory=list)
    #: the question to it that is open
    asked: Any = None
    #: since when the connection to it is lost
    silent_since: float | None = None

    def lost(self) -> Trouble:
        """What to report if the watch on it has ended with it. Ray itself may take a minute to notice."""
        owners = ", ".join(dict.fromkeys(part.owner for part in self.parts)) or "nothing left"
        name, what = f"node {self.address}", "has ended, or cannot be reached"
        return Trouble(WatchedProcess(name, "ray", 0), "ended", what, f"{name} {what}. It had {owners}.")


class RunWatch:
    """Watches the processes of a run, from its start to its end."""

    def __init__(self, hang_s: float) -> None:
        """`hang_s`: seconds without a sign of life after which a process counts as hung."""
        self._hang_s = hang_s
        self._here = HostWatch(hang_s)
        #: by Ray's id
        self._others: dict[str, _Node] = {}
        #: what processes will say of themselves: `Worker.identify`
        self._unknown: list[tuple[str, PartKind, Path, Any]] = []
        self._supervisors: list[Callable[[], None]] = []
        #: the daemons of the Ray that this process started, if it started one
        self._own_ray: set[WatchedProcess] = set()
        self._looked_at = 0.0
        self._syncing = False
        #: called for an engine or the router in trouble, with what makes the message about it
        self._restart: Callable[[str, Callable[[], str]], None] | None = None

    def add(self, part: WatchedProcess) -> None:
        """Watch a process of this machine."""
        self._here.add(part)

    def add_ray(self) -> None:
        """Watch the daemons of a Ray that this process started."""
        for child in psutil.Process().children():
            for part in _parts_of_ray(child):
                self._own_ray.add(part)
                self._here.add(part)

    def enlist(self, kind: PartKind) -> Callable[[int, Path, Any], None]:
        """What adds the workers of one kind, each as soon as it has said which process it is."""

        def add(index: int, log: Path, identity: Any) -> None:
            self._unknown.append((_NAMES[kind].format(index), kind, log, identity))

        return add

    def supervise(self, check: Callable[[], None]) -> None:
        """Call `check` before every look; it raises if what it supervises has ended."""
        self._supervisors.append(check)

    def restart_with(self, restart: Callable[[str, Callable[[], str]], None]) -> None:
        """Call `restart` for an engine or the router in trouble, as long as no other part is, instead of raising.

        Its arguments are `WatchedProcess.owner`, and what makes the message. It may raise.
        """
        self._restart = restart

    def kill(self, owner: str) -> None:
        """SIGKILL what is left of the engine or the router, and watch it no longer: see `HostWatch.kill`."""
        self._here.kill(owner)
        for node in self._others.values():
            node.actor.kill.remote(owner)
            node.parts = [part for part in node.parts if part.owner != owner]
        self._unknown = [entry for entry in self._unknown if not entry[0].startswith(f"{owner}'s ")]

    @contextmanager
    def during_sync(self) -> Iterator[None]:
        """In the body weights are sent, and an engine's scheduler waits for them."""
        self._syncing = True
        try:
            yield
        finally:
            self._syncing = False

    def __call__(self) -> None:
        """Raise if a part has ended or hangs. Called several times a second during every wait."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        for check in self._supervisors:
            check()
        self._meet()
        found = self._look(at_once=False)
        if self._restart is None or not all(trouble.part.kind in RESTARTED_ALONE for trouble in found):
            self._raise(found)
            return
        for trouble in found:
            self._restart(trouble.part.owner, trouble.describe)

    def explain(self, *, engines: bool = True, ray_alone: bool = False) -> SlimeError | None:
        """The part in trouble that explains an error, if there is one. A stopped part counts at once.

        Args:
            engines: Whether the end of an engine or of the router can explain it.
            ray_alone: Whether only that of Ray can.
        """
        self._meet()
        found = [one for one in self._look(at_once=True) if not ray_alone or one.part.kind == "ray"]
        try:
            self._raise([one for one in found if engines or one.part.kind not in RESTARTED_ALONE])
        except SlimeError as cause:
            return cause
        return None

    def stacks(self, error: DeadlineError) -> str:
        """Where the processes of the run are; first those whose logs an error names, because they have not answered."""
        found = self._here.stacks()
        asked = [node.actor.stacks.remote() for node in self._others.values()]
        with suppress(RayError):  # their machine, or Ray, is gone
            ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_STACKS_S) if asked else ([], [])
            found += [one for ref in ready for one in ray.get(ref)]
        found.sort(key=lambda one: f"(log: {one[0].log})" not in str(error))
        return "".join(f"\n{part.name} (pid {part.pid}) is here:\n{stack}" for part, stack in found)

    def _look(self, *, at_once: bool) -> list[Trouble]:
        return self._here.look(syncing=self._syncing, at_once=at_once) + self._ask_others(at_once)

    def _ask_others(self, at_once: bool) -> list[Trouble]:
        """The answers to the last questions, or with `at_once` to new ones, of the watches on other machines."""
        found = [one for node in self._others.values() for one in self._answer(node, at_once)]
        while at_once and not found:
            silent = [node for node in self._others.values() if node.silent_since is not None]
            if not silent:
                break
            time.sleep(LOOK_S)  # the nodes may be lost, which would explain the error
            found = [one for node in silent for one in self._answer(node, at_once)]
        return found

    def _answer(self, node: _Node, at_once: bool) -> list[Trouble]:
        asked, node.asked = node.asked, None
        if asked is None or at_once:
            asked = node.actor.look_and_describe.remote(self._syncing, at_once)
        ready, _ = ray.wait([asked], timeout=_ANSWER_S if at_once else 0)
        try:
            if ready:
                found: list[Trouble] = ray.get(asked)
                node.silent_since = None
                return found
            node.asked = asked
        except ActorUnavailableError:  # a connection broke; the next question makes another
            if node.silent_since is None:
                node.silent_since = time.monotonic()
        except RayActorError:
            if not any(one["Alive"] for one in ray.nodes() if one["NodeID"] == node.id):
                return [node.lost()]
            self._watch_again(node)
        except RayError:
            pass
        lost = node.silent_since is not None and time.monotonic() - node.silent_since > _SILENT_S
        return [node.lost()] if lost else []

    def _watch_again(self, node: _Node) -> None:
        """Start the watch on a node that is there, whose own process has ended."""
        logger.warning("the watch on node %s has ended, and is started again", node.address)
        node.silent_since, node.actor = None, self._start_watch(node.id)
        for part in node.parts:
            node.actor.add.remote(part)

    def _meet(self) -> None:
        """Begin to watch the workers that have said which process they are."""
        for entry in list(self._unknown):
            name, kind, log, identity = entry
            ready, _ = ray.wait([identity], timeout=0)
            if not ready:
                continue
            self._unknown.remove(entry)
            try:
                pid, page, node = ray.get(identity)
            except RayError:
                continue  # it died at once: the wait for it reports that
            self._watch_of(node, WatchedProcess(name, kind, pid, log, page))

    def _watch_of(self, node: str, part: WatchedProcess) -> None:
        if node == ray.get_runtime_context().get_node_id():
            self._here.add(part)
            return
        if node not in self._others:
            [address] = [one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node]
            self._others[node] = _Node(node, address, self._start_watch(node))
        self._others[node].actor.add.remote(part)
        self._others[node].parts.append(part)

    def _start_watch(self, node: str) -> Any:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(RemoteWatch).options(num_cpus=0, scheduling_strategy=there)
        return actor.remote(self._hang_s, os.getcwd())

    def _raise(self, found: Sequence[Trouble]) -> None:
        if not found:
            return
        trouble = min(found, key=_how_late)
        if trouble.part in self._own_ray and trouble.kind == "stopped":
            with suppress(ProcessLookupError):
                os.kill(trouble.part.pid, signal.SIGKILL)  # leaving Ray would wait for it for ever
        # Agents end with their node service, and may be seen before it.
        if trouble.part in self._own_ray and trouble.kind == "ended" and (failure := ray_failure(killed=True)):
            raise ClusterError(failure)
        others = [other.part.name for other in found if other is not trouble]
        note = f"\nAlso in trouble: {', '.join(others)}." if others else ""
        raise LOSSES[trouble.part.kind](trouble.describe() + note)

    def close(self) -> None:
        """Stop watching."""
        for node in self._others.values():
            ray.kill(node.actor)
        self._others, self._unknown = {}, []
        self._here = HostWatch(self._hang_s)


def _how_late(trouble: Trouble) -> tuple[int, int, bool]:
    """Sorts parts in trouble by which of them most likely caused the rest."""
    part = trouble.part
    return _TROUBLES.index(trouble.kind), [*LOSSES].index(part.kind), part.name not in _RAY_AGENTS.values()


def _parts_of_ray(process: psutil.Process) -> Iterator[WatchedProcess]:
    """A daemon of Ray with the agents that it has started; nothing for other processes."""
    with suppress(psutil.Error):
        if (name := RAY_DAEMONS.get(process.name())) is not None:
            yield WatchedProcess(name, "ray", process.pid)
            for child in process.children():
                if (agent := _RAY_AGENTS.get(child.name())) is not None:
                    yield WatchedProcess(agent, "ray", child.pid)


class RemoteWatch(HostWatch):
    """The actor that looks at the processes of another machine."""

    def __init__(self, hang_s: float, folder: str) -> None:
        """`folder`: the driver's working folder, to which the paths of logs are relative."""
        super().__init__(hang_s)
        os.chdir(folder)

    def add(self, part: WatchedProcess) -> None:
        """Watch one more process, and the node service of Ray that started it."""
        super().add(part)
        for of_ray in _parts_of_ray(psutil.Process(os.getppid())):
            super().add(of_ray)

    def look_and_describe(self, syncing: bool, at_once: bool) -> list[Trouble]:
        """What is wrong, with the message for each, which only this machine can write."""
        return [replace(one, written=one.describe()) for one in self.look(syncing=syncing, at_once=at_once)]
