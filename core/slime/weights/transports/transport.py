"""What all transports share: calls to the whole fleet of engines, and the sequence of a weight sync.

Calls go to all engines at once, each failure names its engine and phase, and one deadline covers them all.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slime.config.weight_options import CLEANUP_S
from slime.engine.control import EngineControl, UpdatedModels
from slime.errors import EngineRefusedError, WeightSyncError
from slime.plugin.architecture import Architecture
from slime.weights.shards import NamedTensors
from slime.weights.transports.stages import Turns, stage_metrics
from slime.weights.verify import WeightCheck


def joined_by_engines(model: Architecture) -> list[tuple[str, ...]]:
    """Sets of tensors that an engine must get in one call.

    It joins them in one parameter, and forgets the first ones if the others are not in the same call: both keep their
    old values then, without an error.
    """
    names: dict[str, list[str]] = {}
    several: set[str] = set()
    for rule in model.rules:
        if rule.expert is None:  # each expert has its own place in the engine's parameter
            several.update({rule.engine} & names.keys())
            names.setdefault(rule.engine, []).extend(rule.hf)
    return [tuple(names[engine]) for engine in names if engine in several]


def sync_buckets(
    named: NamedTensors, limit: int, joined: Sequence[Sequence[str]]
) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in buckets for one call each.

    Args:
        named: Names and tensors.
        limit: Bytes of a bucket, unless one tensor or one set is larger.
        joined: Sets of names, each of which goes into one bucket.
    """
    set_of = {name: index for index, names in enumerate(joined) for name in names}
    waiting: dict[int, list[tuple[str, Tensor]]] = {}
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in named:
        ready, index = [(name, tensor)], set_of.get(name)
        if index is not None:
            parts = waiting.setdefault(index, [])
            parts.append((name, tensor))
            if len(parts) < len(joined[index]):
                continue
            ready = waiting.pop(index)
        size = sum(one.nbytes for _, one in ready)
        if bucket and held + size > limit:
            yield bucket
            bucket, held = [], 0
        bucket += ready
        held += size
    # Parts of sets that never became complete: the check finds out.
    bucket += [part for parts in waiting.values() for part in parts]
    if bucket:
        yield bucket


def _refused(call: futures.Future[Any]) -> bool:
    return call.done() and isinstance(call.exception(), EngineRefusedError)


class FleetCall:
    """One call to each of several engines, running in threads."""

    def __init__(self, phase: str, running: dict[futures.Future[Any], EngineControl]) -> None:
        self._phase = phase
        self._running = running

    def raise_failed(self) -> None:
        """Raise the first failure so far."""
        for future, engine in self._running.items():
            if future.done() and (error := future.exception()) is not None:
                message = f"Weight sync: {self._phase} failed at engine {engine.url}: {error}"
                # An engine that says no is not broken: most often another one is missing, or the weights do not fit.
                raise WeightSyncError(message, [] if _refused(future) else [engine.url]) from error

    def unanswered(self) -> list[str]:
        """URLs of the engines that have not answered yet."""
        return [engine.url for future, engine in self._running.items() if not future.done()]

    def silent(self) -> list[str]:
        """URLs of the engines that have not answered yet, or cannot."""
        return [
            engine.url
            for future, engine in self._running.items()
            if not future.done() or not (future.exception() is None or _refused(future))
        ]

    def refused(self) -> bool:
        """Whether an engine has answered no."""
        return any(_refused(future) for future in self._running)

    def settle(self, seconds: float) -> None:
        """Wait at most this long for all calls to end, successfully or not."""
        futures.wait(self._running, timeout=seconds)

    def wait(self, deadline: float) -> list[Any]:
        """Results in engine order. Raises on the first failure and at the deadline (monotonic seconds)."""
        _, missing = futures.wait(
            self._running, timeout=max(0.0, deadline - time.monotonic()), return_when=futures.FIRST_EXCEPTION
        )
        self.raise_failed()
        if missing:
            late = self.unanswered()
            raise WeightSyncError(
                f"Weight sync: {self._phase} did not finish in time at {', '.join(late)}. Look at the engine's log; "
                "--weight-sync-timeout-s sets the limit.",
                late,
            )
        return [future.result() for future in self._running]


class Fleet:
    """The engines of one sync, called together."""

    def __init__(self, engines: Sequence[EngineControl], timeout_s: float) -> None:
        self.engines = engines
        self.deadline = time.monotonic() + timeout_s
        # Three threads for each engine: both steps of cleaning up may begin while a call is still running.
        self._pool = futures.ThreadPoolExecutor(max_workers=max(1, 3 * len(engines)))

    def remaining_s(self) -> float:
        """Seconds to the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    def start(self, phase: str, call: Callable[[EngineControl], Any]) -> FleetCall:
        """Begin one call to every engine. Raises `WeightSyncError` after the deadline, and names no engine: all have
        answered, if late."""
        if not self.remaining_s():
            raise WeightSyncError(
                f"Weight sync: no time was left for {phase}: trainer and engines took it all for what came before."
                " --weight-sync-timeout-s sets the limit."
            )
        return FleetCall(phase, {self._pool.submit(call, engine): engine for engine in self.engines})

    def each(self, phase: str, call: Callable[[EngineControl], Any]) -> list[Any]:
        """Call every engine and wait. Raises `WeightSyncError` with phase and engine."""
        return self.start(phase, call).wait(self.deadline)

    def clean_up(self, phase: str, call: Callable[[EngineControl], Any]) -> list[str]:
        """Call every engine after a failure. All are tried; failures are returned as text."""
        calls = {self._pool.submit(call, engine): engine for engine in self.engines}
        done, missing = futures.wait(calls, timeout=CLEANUP_S)
        failed = [f"{phase} at {calls[one].url}: {one.exception()}" for one in done if one.exception() is not None]
        return failed + [f"{phase} at {calls[one].url}: no answer in {CLEANUP_S:.0f} s" for one in missing]

    def close(self) -> None:
        """Release the threads; calls still running end at their own deadlines."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(kw_only=True, eq=False)
class WeightTransport(ABC):
    """Sends the trainer's weights to engines: those of each pipeline stage from its first rank.

    The first stage's sender pauses the engines and resumes them.

    Attributes:
        engines: Engines to send to.
        timeout_s: Seconds that one sync may take.
        check: Compares the engines' weights with the trainer's after each sync.
        joined: Sets of tensors that engines must get in one call.
        keep_kv: Let requests in flight keep the KV cache of the old weights. Only for engines without a prefix cache,
            which could not be flushed.
        models: The engines' models that are updated from memory. From disk all are.
        repeated: Whether a failed sync is repeated. The engines are paused until then: a part of their weights may be
            new, and no token may come from such a mixture.
        turns: If there are several senders, the turns of this one.
    """

    engines: Sequence[EngineControl]
    timeout_s: float
    check: WeightCheck | None = None
    joined: Sequence[Sequence[str]] = ()
    keep_kv: bool = False
    models: UpdatedModels = "target"
    repeated: bool = False
    turns: Turns | None = None
    #: bytes of the tensors that this sender has been given in this sync
    _sent: int = field(default=0, init=False)
    #: of this sync, on the first sender: stage -> bytes and seconds
    _shares: dict[int, tuple[int, float]] = field(default_factory=dict, init=False)

    def connect(self, engines: Sequence[EngineControl]) -> None:
        """Send to these engines from now on. Some may have been started again since the last sync."""
        self.close()
        self.engines = engines

    def send(self, named: NamedTensors, *, version: str) -> dict[str, float]:
        """Update every engine to these weights and this weight version. Of several senders, each in `Turns.sync`.

        The whole sequence: pause, update and flush caches, check (if requested), resume.

        Returns:
            Metrics, of the first sender: `synced_bytes`, which went to each engine, and the share of each of several.

        Raises:
            WeightSyncError: With engine and phase. Engines that still answer are resumed, unless the sync is repeated.
        """
        self._sent = 0
        counted = self._counted(named)
        observed = counted if self.check is None else self.check.observe(counted)
        if self.stage > 0:
            self._send_stage(observed, version)
            return {}
        self._shares.clear()
        self._update(observed, version)
        total = float(sum(size for size, _ in self._shares.values()))
        return {"synced_bytes": total, **({} if self.turns is None else stage_metrics(self._shares))}

    @property
    def stage(self) -> int:
        """The pipeline stage of this sender; that of the only one is 0."""
        return 0 if self.turns is None else self.turns.stage

    def _counted(self, named: NamedTensors) -> NamedTensors:
        for name, tensor in named:
            self._sent += tensor.nbytes
            yield name, tensor

    def _send_stage(self, named: NamedTensors, version: str) -> None:
        """The part of a sender other than the first."""
        assert self.turns is not None
        with closing(Fleet(self.engines, self.timeout_s)) as fleet:
            seconds, report = self._send_part(fleet, named, version)
        observed = None if self.check is None else self.check.report()
        self.turns.done(sent=self._sent, seconds=seconds, report=[report, observed])

    def _taken(self, reports: Mapping[int, Mapping[str, Any]]) -> list[Any]:
        """What other senders have reported of their parts, of which bytes, seconds and checksums are kept."""
        for stage, message in reports.items():
            self._shares[stage] = message["sent"], message["seconds"]
            if self.check is not None:
                self.check.add(message["report"][1])
        return [message["report"][0] for message in reports.values()]

    def _update(self, named: NamedTensors, version: str) -> None:
        """Called on the first or only sender: pause the engines, and have them load the tensors of all senders.

        This one sends from memory, one sender after the other or, if `_at_once`, all at the same time.
        """
        with self._paused(session=True) as fleet:
            if self.turns is not None and self._at_once:
                self.turns.begin_together(fleet.deadline)
            seconds, _ = self._send_part(fleet, named, version)
            self._shares[0] = self._sent, seconds
            if self.turns is not None:
                self._taken(self.turns.others(fleet.deadline))

    @property
    def _at_once(self) -> bool:
        """Whether several senders send from memory at the same time. Each engine takes their calls one by one."""
        return False

    @abstractmethod
    def _send_part(self, fleet: Fleet, named: NamedTensors, version: str) -> tuple[float, Any]:
        """Send this sender's tensors when it may; in how many seconds, and what the first sender must know."""

    @contextmanager
    def _paused(self, *, session: bool) -> Iterator[Fleet]:
        """Pause the engines, let the body update them, compare checksums, and resume them.

        Each call of the body drops cached prefixes if `_flushes` says so. After a failure, sessions are closed and the
        engines that answer are resumed, or stay paused if the sync is `repeated`. The original error is raised, with
        notes on what could not be cleaned up.

        Args:
            session: Whether to open a weight update session around the body, which updates from memory need.
        """
        with closing(Fleet(self.engines, self.timeout_s)) as fleet:
            open_session = False
            try:
                fleet.each("pausing", lambda engine: engine.pause("in_place" if self.keep_kv else "retract"))
                if session:
                    open_session = True
                    fleet.each("beginning the update", lambda engine: engine.begin_weight_update(self.models))
                yield fleet
                if session:
                    fleet.each("ending the update", lambda engine: engine.end_weight_update())
                    open_session = False
                if self.check is not None:
                    held = fleet.each("reading checksums", lambda engine: engine.weights_checksum())
                    for engine, checksums in zip(self.engines, held, strict=True):
                        self.check.compare(engine.url, checksums)
                fleet.each("resuming", lambda engine: engine.resume())
            except BaseException as error:
                if open_session:
                    fleet.clean_up("ending the update", lambda engine: engine.end_weight_update())
                if self.repeated:  # some may not be paused yet
                    failures = fleet.clean_up("pausing", lambda engine: engine.pause())
                else:
                    failures = fleet.clean_up("resuming", lambda engine: engine.resume())
                for failure in failures:
                    error.add_note(f"and then {failure}")
                raise

    def _flushes(self, number: int) -> bool:
        """Whether call `number` of an update drops cached prefixes: the first does, and then no request runs."""
        return number == 0 and not self.keep_kv

    def close(self) -> None:  # noqa: B027 - most transports keep no connection
        """Disconnect from the engines. May be called twice, and after a failure."""
