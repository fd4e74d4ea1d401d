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
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.errors import ClusterError, DeadlineError, SlimeError
from slime.run.ray_session import RAY_DAEMONS, ray_failure
from slime.run.supervise.host_watch import HostWatch, Trouble, WatchedProcess
from slime.run.supervise.losses import CAUSES, LOSSES, PartKind

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
#: a part in trouble, and what makes the message about it
Found: TypeAlias = tuple[Trouble, Callable[[], str]]
_NAMES = {"trainer": "trainer rank {}", "engine": "engine {}'s supervisor", "rollout": "the rollout process"}
#: what a node service starts, and does not outlive: when one of them ends, it ends at once with all of its workers
_RAY_AGENTS = {
    "ray::DashboardAgent": "Ray's dashboard agent (ray::DashboardAgent)",
    "ray::RuntimeEnvAgent": "Ray's agent for runtime environments (ray::RuntimeEnvAgent)",
}


class RunWatch:
    """Watches the processes of a run, from its start to its end."""

    def __init__(self, hang_s: float) -> None:
        """`hang_s`: seconds without a sign of life after which a process counts as hung."""
        self._hang_s = hang_s
        self._here = HostWatch(hang_s)
        #: Ray's id of another node -> what watches there; its address, and the parts of the run on it
        self._others: dict[str, Any] = {}
        self._there: dict[str, tuple[str, list[WatchedProcess]]] = {}
        self._asked: dict[str, Any] = {}
        #: nodes to which the connection was lost, and when
        self._silent: dict[str, float] = {}
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
        for actor in self._others.values():
            actor.kill.remote(owner)
        for node, (address, parts) in self._there.items():
            self._there[node] = address, [part for part in parts if part.owner != owner]
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
        if self._restart is None or not all(LOSSES[trouble.part.kind].restarted_alone for trouble, _ in found):
            self._raise(found)
            return
        for trouble, describe in found:
            self._restart(trouble.part.owner, describe)

    def explain(self, *, engines: bool = True, ray_alone: bool = False) -> SlimeError | None:
        """The part in trouble that explains an error, if there is one. A stopped part counts at once.

        Args:
            engines: Whether the end of an engine or of the router can explain it.
            ray_alone: Whether only that of Ray can.
        """
        self._meet()
        found = [one for one in self._look(at_once=True) if not ray_alone or one[0].part.kind == "ray"]
        try:
            self._raise([one for one in found if engines or not LOSSES[one[0].part.kind].restarted_alone])
        except SlimeError as cause:
            return cause
        return None

    def stacks(self, error: DeadlineError) -> str:
        """Where the processes of the run are; first those whose logs an error names, because they have not answered."""
        found = self._here.stacks()
        asked = [actor.stacks.remote() for actor in self._others.values()]
        with suppress(RayError):  # their machine, or Ray, is gone
            ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_STACKS_S) if asked else ([], [])
            found += [one for ref in ready for one in ray.get(ref)]
        found.sort(key=lambda one: f"(log: {one[0].log})" not in str(error))
        return "".join(f"\n{part.name} (pid {part.pid}) is here:\n{stack}" for part, stack in found)

    def _look(self, *, at_once: bool) -> list[Found]:
        here = self._here.look(syncing=self._syncing, at_once=at_once)
        return [(trouble, trouble.describe) for trouble in here] + self._ask_others(at_once)

    def _ask_others(self, at_once: bool) -> list[Found]:
        """The answers to the last questions, or with `at_once` to new ones, of the watches on other machines."""
        found = [one for node in [*self._others] for one in self._answer(node, at_once)]
        while at_once and self._silent and not found:  # the nodes may be lost, which would explain the error
            time.sleep(LOOK_S)
            found = [one for node in [*self._silent] for one in self._answer(node, at_once)]
        return found

    def _answer(self, node: str, at_once: bool) -> list[Found]:
        asked = self._asked.pop(node, None)
        if asked is None or at_once:
            asked = self._others[node].look_and_describe.remote(self._syncing, at_once)
        ready, _ = ray.wait([asked], timeout=_ANSWER_S if at_once else 0)
        try:
            if ready:
                found: list[Found] = [(trouble, partial(str, text)) for trouble, text in ray.get(asked)]
                self._silent.pop(node, None)
                return found
            self._asked[node] = asked
        except ActorUnavailableError:  # a connection broke; the next question makes another
            self._silent.setdefault(node, time.monotonic())
        except RayActorError:
            if not any(one["Alive"] for one in ray.nodes() if one["NodeID"] == node):
                return [self._lost_node(node)]
            self._watch_again(node)
        except RayError:
            pass
        now = time.monotonic()
        return [self._lost_node(node)] if now - self._silent.get(node, now) > _SILENT_S else []

    def _lost_node(self, node: str) -> Found:
        """A node with which the watch on it has ended. Ray itself may take a minute to notice."""
        address, parts = self._there[node]
        owners = ", ".join(dict.fromkeys(part.owner for part in parts)) or "nothing left"
        part, what = WatchedProcess(f"node {address}", "ray", 0), "has ended, or cannot be reached"
        return Trouble(part, "ended", what), partial(str, f"{part.name} {what}. It had {owners}.")

    def _watch_again(self, node: str) -> None:
        """Start the watch on a node that is there, whose own process has ended."""
        address, parts = self._there[node]
        logger.warning("the watch on node %s has ended, and is started again", address)
        self._silent.pop(node, None)
        self._others[node] = self._start_watch(node)
        for part in parts:
            self._others[node].add.remote(part)

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
            self._others[node] = self._start_watch(node)
            [address] = [one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node]
            self._there[node] = address, []
        self._others[node].add.remote(part)
        self._there[node][1].append(part)

    def _start_watch(self, node: str) -> Any:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(RemoteWatch).options(num_cpus=0, scheduling_strategy=there)
        return actor.remote(self._hang_s, os.getcwd())

    def _raise(self, found: Sequence[Found]) -> None:
        if not found:
            return
        trouble, describe = min(found, key=_how_late)
        if trouble.part in self._own_ray and trouble.kind == "stopped":
            with suppress(ProcessLookupError):
                os.kill(trouble.part.pid, signal.SIGKILL)  # leaving Ray would wait for it for ever
        # Agents end with their node service, and may be seen before it.
        if trouble.part in self._own_ray and trouble.kind == "ended" and (failure := ray_failure(killed=True)):
            raise ClusterError(failure)
        others = [other.part.name for other, _ in found if other is not trouble]
        note = f"\nAlso in trouble: {', '.join(others)}." if others else ""
        raise LOSSES[trouble.part.kind].error(describe() + note)

    def close(self) -> None:
        """Stop watching."""
        for actor in self._others.values():
            ray.kill(actor)
        self._others, self._asked, self._silent, self._unknown = {}, {}, {}, []
        self._here = HostWatch(self._hang_s)


def _how_late(found: Found) -> tuple[int, int, bool]:
    """Sorts parts in trouble by which of them most likely caused the rest."""
    part = found[0].part
    return _TROUBLES.index(found[0].kind), CAUSES.index(part.kind), part.name not in _RAY_AGENTS.values()


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

    def look_and_describe(self, syncing: bool, at_once: bool) -> list[tuple[Trouble, str]]:
        """What is wrong, and the message for each, which only this machine can write."""
        return [(trouble, trouble.describe()) for trouble in self.look(syncing=syncing, at_once=at_once)]
