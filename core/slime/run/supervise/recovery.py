"""Engines and the router that die or hang are started again while the run goes on.

An engine is started with the weights of the model folder. So a lost engine gets no requests, neither through the router
nor directly, until it runs again at its old address and a weight sync has reached it. The requests that it had are sent
again by the rollout process: see `slime.engine.requests`.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from slime.config import RunConfig
from slime.errors import (
    ClusterError,
    DeadlineError,
    EngineError,
    ProcessDiedError,
    SlimeError,
    UnexpectedError,
    WeightSyncError,
)
from slime.errors.raised import ONLY_IN_LOGS
from slime.observe.observer import RunObserver
from slime.run.engines import ROUTER, Engines, engine_name
from slime.run.rollout_process import RolloutProcess
from slime.run.supervise.losses import is_curable
from slime.run.supervise.watch import RunWatch
from slime.run.workers import TICK_S, PendingCall, Workers

logger = logging.getLogger(__name__)

#: seconds that an engine in trouble gets to end and remove its files; one that hangs is killed then
_ENDING_S = 20.0
#: seconds after a failed weight sync in which the end of an engine is noticed
_NOTICED_S = 10.0
#: seconds between two questions whether the node of an engine that is being started is still there
_NODE_S = 5.0

T = TypeVar("T")


@dataclass
class _Lost:
    """A part that is out of service."""

    #: how it was lost
    error: SlimeError
    #: monotonic seconds: since when, and until when it is to have ended, or to run again
    since: float
    deadline: float
    #: monotonic seconds: when the cluster is to be asked for the engine's node
    ask_node_at: float
    #: of an engine: its end, then its start
    ending: PendingCall[None] | None = None
    starting: PendingCall[None] | None = None
    #: an engine that runs again, and waits for the weights
    runs: bool = False


class Recovery:
    """Starts engines and the router again. The watch calls it during every wait of the driver.

    Without fault tolerance, before `begin`, and when the restarts of the run are used up, it raises what was lost.
    """

    def __init__(
        self,
        config: RunConfig,
        engines: Engines,
        watch: RunWatch,
        rollout: Workers,
        observer: RunObserver,
        *,
        trains: bool,
    ) -> None:
        """Begin to supervise the engines.

        Args:
            config: The run's configuration.
            engines: The engines and the router.
            watch: The watch over the run.
            rollout: The rollout process.
            observer: Receives what is lost and restarted.
            trains: Whether a trainer sends weights, which an engine needs before it serves.
        """
        self._config = config
        self._engines = engines
        self._watch = watch
        self._rollout = rollout
        self._observer = observer
        self._trains = trains
        self._active = False
        #: in the middle of a change, during whose waits the watch calls again
        self._busy = False
        self._lost: dict[str, _Lost] = {}
        #: how often each engine was started again
        self._starts: dict[str, int] = {}
        self._repeated = 0
        #: the question to the rollout process which engines answer with garbage
        self._asked: PendingCall[list[str]] | None = None
        watch.supervise(self.check)

    def begin(self) -> None:
        """From now on, restart what is lost."""
        if self._config.restarts_engines:
            self._active = True
            self._watch.restart_with(self.restart)

    # --- restarting: called by the watch --------------------------------------------------------------

    def check(self) -> None:
        """Notice what has ended, and go on with restarts; hardly blocks. Raises what cannot be restarted."""
        if self._busy:
            return
        for owner, error in self._engines.lost():
            if not self._restarting(owner):
                self._lose(owner, error)
        if self._active and self._engines.urls:
            self._look_at_answers()
        for owner in list(self._lost):
            self._advance(owner, self._lost[owner])

    def _look_at_answers(self) -> None:
        """Restart engines that answer requests with something else than a response."""
        if self._asked is not None and self._asked.finished:
            [urls] = self._asked.wait()
            self._asked = None
            for url in urls:
                name = engine_name(self._engines.urls.index(url))
                if not self._restarting(name):
                    error = f"{name} at {url} answers requests with something else than a response"
                    self._lose(name, EngineError(error))
        if self._asked is None:
            self._asked = self._rollout.begin(
                RolloutProcess.engines_answering_garbage, doing="asking how the engines answer", timeout_s=30.0
            )

    def restart(self, owner: str, why: Callable[[], str]) -> None:
        """Begin to start the engine `owner`, or `ROUTER`, again, unless that has begun already.

        Args:
            owner: What is in trouble.
            why: Makes the message about it.
        """
        if not self._busy and not self._restarting(owner):
            self._lose(owner, EngineError(why()))

    def _restarting(self, owner: str) -> bool:
        """Whether an engine is lost already. A router that is started again at once may be lost once more."""
        lost = self._lost.get(owner)
        return lost is not None and owner != ROUTER and not lost.runs

    def _lose(self, owner: str, error: SlimeError) -> None:
        """Take a part out of service and begin to end it, or raise the error about it."""
        kind = "router" if owner == ROUTER else "engine"
        if not self._active:
            raise error
        if kind == "engine" and self._config.cluster.rollout_external_engine_addrs:
            self._drop(owner, error)
            return
        if kind == "engine":
            self._require_node(owner, error)
        if (used := self._observer.restarts.total()) >= (most := self._config.cluster.max_restarts):
            raise type(error)(f"{error}\nIt is not restarted: {used} of {most} restarts (--max-restarts) are used up.")
        now, lost = time.monotonic(), self._lost.get(owner)
        self._observer.part_lost(kind, owner, str(error))
        self._lost[owner] = fresh = _Lost(error, now if lost is None else lost.since, now + _ENDING_S, now + _NODE_S)
        if owner == ROUTER:
            fresh.deadline = now + self._config.cluster.startup_timeout_s
            self._engines.restart_router(self._serving())
            return
        fresh.ending = self._engines.begin_end(_index(owner))
        self._serve()

    def _drop(self, owner: str, error: SlimeError) -> None:
        """Go on without an engine that somebody else started. It stays away even if it comes back: with what weights?

        Raises:
            EngineError: It was the last one.
        """
        now = time.monotonic()
        # Only its owner may let it generate: a part of its weights may be of an update that did not end.
        paused = "It may still be paused, with a part of newer weights: restart it before others use it."
        self._observer.part_dropped(owner, f"{error}\n{paused}")
        self._lost[owner] = _Lost(error, now, math.inf, math.inf)
        self._engines.begin_end(_index(owner))
        if not self._serving():
            raise EngineError(f"{error}\nIt was the last engine of --rollout-external-engine-addrs: none is left.")
        self._serve()

    def _advance(self, owner: str, lost: _Lost) -> None:
        late = time.monotonic() > lost.deadline
        if owner == ROUTER:
            if self._engines.router_ready():
                self._return([ROUTER])
            elif late:
                self._lose(owner, self._late(owner))
        elif lost.starting is None:
            if late or (lost.ending is not None and lost.ending.finished):
                self._starts[owner] = self._starts.get(owner, 0) + 1
                lost.starting = self._engines.begin_start(_index(owner))
                lost.deadline = time.monotonic() + lost.starting.timeout_s
        elif not lost.runs and (late or lost.starting.finished):
            self._started(owner, lost, lost.starting, late)
        elif not lost.runs and time.monotonic() > lost.ask_node_at:
            lost.ask_node_at = time.monotonic() + _NODE_S
            self._require_node(owner, lost.error)

    def _require_node(self, owner: str, error: SlimeError) -> None:
        """Raise if the node of an engine has left: at its address nothing can be started, and Ray would wait for it.

        Another attempt of the whole run finds other places for all engines.
        """
        if (host := self._engines.node_left(_index(owner))) is not None:
            raise ClusterError(
                f"{owner}'s node {host} has left the Ray cluster, or cannot be reached, so {owner} is not started there"
                f" again.\n{error}"
            ) from error

    def _started(self, owner: str, lost: _Lost, starting: PendingCall[None], late: bool) -> None:
        """An engine runs again, or could not be started."""
        lost.runs = True
        try:
            if late and not starting.finished:
                raise self._late(owner)
            starting.wait()
        except SlimeError as error:
            self._lose(owner, error)
            return
        self._engines.started(_index(owner))
        if not self._trains:
            self._return([owner])

    def _late(self, owner: str) -> DeadlineError:
        return DeadlineError(f"{owner} did not start again in {self._config.cluster.startup_timeout_s:.0f} s")

    # --- who serves requests --------------------------------------------------------------------------

    def _serving(self) -> list[str]:
        """URLs of the engines that get requests."""
        return [url for index, url in enumerate(self._engines.urls) if engine_name(index) not in self._lost]

    def _serve(self) -> None:
        """Tell the router and the rollout process which engines get requests."""
        urls, self._busy = self._serving(), True
        trouble: SlimeError | None = None
        try:
            assert self._engines.url is not None
            [repeated] = self._rollout.begin(
                RolloutProcess.connect, self._engines.url, urls, doing="changing the engines"
            ).wait()
            self._repeated += repeated
            if ROUTER not in self._lost:
                try:
                    self._engines.route(urls)
                except (EngineError, DeadlineError) as error:
                    trouble = error
        finally:
            self._busy = False
        if trouble is not None:
            self._lose(ROUTER, trouble)

    def _return(self, owners: Sequence[str]) -> None:
        """These serve again."""
        since = {owner: self._lost.pop(owner).since for owner in owners}
        self._serve()
        repeated, self._repeated = self._repeated, 0
        for owner in owners:
            if owner in self._lost:
                continue  # again, meanwhile
            self._observer.part_back(owner, time.monotonic() - since[owner], repeated)
            repeated = 0

    # --- weights ----------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether an engine that was restarted waits for weights."""
        return any(lost.runs for lost in self._lost.values())

    @property
    def any_serves(self) -> bool:
        """Whether an engine is in service."""
        return bool(self._serving())

    def sync(self, send: Callable[[list[str], int], T]) -> T:
        """Send weights to every engine that runs, and put those that were restarted into service.

        If an engine is lost meanwhile, or does not take them, they are sent again: to the others, and to it too if it
        already runs again.

        Args:
            send: Sends them to the engines at these URLs. Its second argument is how often engines were restarted.
        """
        while True:
            fleet = self._running()
            starts = sum(self._starts.values())
            try:
                result = send([self._engines.urls[_index(owner)] for owner in fleet], starts)
            except WeightSyncError as error:
                if not self._active:
                    raise
                if not self._noticed(fleet, error):
                    self._blame(fleet, error)
                told = "; ".join([str(error), *getattr(error, "__notes__", ())])
                logger.warning("weights are sent again: %s", told, extra={ONLY_IN_LOGS: True})
                continue
            reached = [owner for owner in fleet if self._starts.get(owner, 0) == fleet[owner]]
            if back := [owner for owner in reached if owner in self._lost and self._lost[owner].runs]:
                self._return(back)
            return result

    def _running(self) -> dict[str, int]:
        """The engines that run, and how often each was restarted. Waits for one if there is none."""
        while True:
            names = [engine_name(index) for index in range(len(self._engines.urls))]
            running = [name for name in names if name not in self._lost or self._lost[name].runs]
            if running or not names:
                return {name: self._starts.get(name, 0) for name in running}
            self._watch()  # ends the wait: every restart has a deadline, and their number is limited
            time.sleep(TICK_S)

    def _blame(self, fleet: Mapping[str, int], error: WeightSyncError) -> None:
        """Restart the engines that a failed sync names: nothing else shows that they hang. Raises if it names none."""
        blamed = [owner for owner in fleet if self._engines.urls[_index(owner)] in error.urls]
        if not blamed:
            raise error
        for owner in blamed:
            self._lose(owner, error)

    def _noticed(self, fleet: Mapping[str, int], error: WeightSyncError) -> bool:
        """Whether an engine that a failed sync names was lost, or any if it names none; it may take a moment to see."""
        named = {owner for owner in fleet if self._engines.urls[_index(owner)] in error.urls}
        deadline = time.monotonic() + _NOTICED_S
        while time.monotonic() < deadline:
            # Lost, or lost and restarted since.
            lost = {owner for owner in fleet if self._restarting(owner) or self._starts.get(owner, 0) != fleet[owner]}
            if lost and (lost & named or not named):
                return True
            self._watch()
            time.sleep(TICK_S)
        return False

    # --- the end of the run ---------------------------------------------------------------------------

    def blame_first_cause(self, error: SlimeError) -> None:
        """Say why the run ends. Raise the death or hang of a part instead of an error that it caused elsewhere."""
        stacks = self._watch.stacks(error) if isinstance(error, DeadlineError) else ""
        cause = None
        # These already name what was lost, with all that is known of its end. But when Ray ends, its workers end first.
        if isinstance(error, ProcessDiedError | ClusterError):
            cause = self._watch.explain(ray_alone=True)
        else:
            engines = self.may_be_of_engine(error)
            cause = self._watch.explain(engines=engines) or (self._dead_engine() if engines else None)
        if cause is None or _already_names(error, cause):
            self._observer.ending(error)
            if stacks:
                error.add_note(f"When the deadline passed:{stacks}")
            return
        self._observer.ending(cause)
        if stacks:
            cause.add_note(f"When a deadline passed:{stacks}")
        raise cause from error

    def may_be_of_engine(self, error: SlimeError) -> bool:
        """Whether `error` may come from the loss of an engine or of the router."""
        # Requests that an engine takes with it are sent again. So a plugin's error, for example, has another cause,
        # even while an engine is being restarted.
        return not self._active or isinstance(error, UnexpectedError) or is_curable(error, first=False)

    def _dead_engine(self) -> EngineError | None:
        try:
            failures = self._engines.failures()
        except SlimeError:
            return None  # the engines' processes do not answer either, so the original error is more useful
        return EngineError("\n".join(failures)) if failures else None


def _already_names(error: SlimeError, cause: SlimeError) -> bool:
    """Whether an error names the process of a cause, by its id: then the watch has raised it already."""
    first = str(cause).splitlines()[0]
    named = re.match(r".*?\(pid \d+\b", first)
    return (named[0] if named else first) in str(error)


def _index(owner: str) -> int:
    return int(owner.removeprefix("engine "))
