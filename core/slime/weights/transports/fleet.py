"""Calls made to all engines at once, each failure given its engine and phase, all under one deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any

from slime.errors import WeightSyncError
from slime.weights.transports.base import EngineControl
from slime.weights.verify import WeightCheck

#: how long putting things right may take once a sync has failed
_CLEANUP_S = 30.0


class Calls:
    """One call to each of several engines, running in threads."""

    def __init__(self, phase: str, running: dict[futures.Future[Any], EngineControl]) -> None:
        self._phase = phase
        self._running = running

    def raise_failed(self) -> None:
        """Raise the first failure there is so far."""
        for future, engine in self._running.items():
            if future.done() and (error := future.exception()) is not None:
                raise WeightSyncError(f"Weight sync: {self._phase} failed at engine {engine.url}: {error}") from error

    def settle(self, seconds: float) -> None:
        """Wait a while for all calls to end, well or not."""
        futures.wait(self._running, timeout=seconds)

    def wait(self, deadline: float) -> list[Any]:
        """Results in engine order.  Raises on the first failure and at the deadline (monotonic seconds)."""
        _, missing = futures.wait(
            self._running, timeout=max(0.0, deadline - time.monotonic()), return_when=futures.FIRST_EXCEPTION
        )
        self.raise_failed()
        if missing:
            late = ", ".join(self._running[future].url for future in missing)
            raise WeightSyncError(
                f"Weight sync: {self._phase} did not finish in time at {late}. Look at the engine's log; "
                "--weight-sync-timeout-s sets the limit."
            )
        return [future.result() for future in self._running]


class Fleet:
    """The engines of one sync, addressed together."""

    def __init__(self, engines: Sequence[EngineControl], timeout_s: float) -> None:
        self.engines = list(engines)
        self.deadline = time.monotonic() + timeout_s
        self._pool = futures.ThreadPoolExecutor(max_workers=max(1, 2 * len(self.engines)))

    def remaining_s(self) -> float:
        """Seconds to the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    def start(self, phase: str, call: Callable[[EngineControl], Any]) -> Calls:
        """Begin one call at every engine."""
        return Calls(phase, {self._pool.submit(call, engine): engine for engine in self.engines})

    def each(self, phase: str, call: Callable[[EngineControl], Any]) -> list[Any]:
        """Call every engine and wait.  Raises `WeightSyncError` naming phase and engine."""
        return self.start(phase, call).wait(self.deadline)

    def tidy(self, phase: str, call: Callable[[EngineControl], Any]) -> list[str]:
        """Call every engine after a failure: all are tried, failures are returned as text."""
        calls = {self._pool.submit(call, engine): engine for engine in self.engines}
        done, missing = futures.wait(calls, timeout=_CLEANUP_S)
        failed = [f"{phase} at {calls[one].url}: {one.exception()}" for one in done if one.exception() is not None]
        return failed + [f"{phase} at {calls[one].url}: no answer in {_CLEANUP_S:.0f} s" for one in missing]

    def close(self) -> None:
        """Let the threads go; calls still running end at their own deadlines."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def paused(
    engines: Sequence[EngineControl], *, timeout_s: float, session: bool, check: WeightCheck | None
) -> Iterator[Fleet]:
    """Engines paused for an update by the body; afterwards checked, caches flushed, resumed.

    session: bracket the body with begin and end of a weight update, which updates from memory need.
    On failure sessions are closed and engines resumed as far as they answer, and the original error goes on with
    what could not be put right as a note.
    """
    fleet = Fleet(engines, timeout_s)
    open_session = False
    try:
        fleet.each("pausing", lambda engine: engine.pause(mode="retract"))
        if session:
            open_session = True
            fleet.each("beginning the update", lambda engine: engine.begin_weight_update())
        yield fleet
        if session:
            fleet.each("ending the update", lambda engine: engine.end_weight_update())
            open_session = False
        if check is not None:
            held = fleet.each("reading checksums", lambda engine: engine.weights_checksum())
            for engine, checksums in zip(fleet.engines, held, strict=True):
                check.compare(engine.url, checksums)
        fleet.each("flushing the cache", lambda engine: engine.flush_cache())
        fleet.each("resuming", lambda engine: engine.resume())
    except BaseException as error:
        if open_session:
            fleet.tidy("ending the update", lambda engine: engine.end_weight_update())
        for failure in fleet.tidy("resuming", lambda engine: engine.resume()):
            error.add_note(f"and then {failure}")
        raise
    finally:
        fleet.close()
