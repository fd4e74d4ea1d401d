"""Reports a blocked event loop: for how long, in which component's code, with the stack.

Generators, and rewards with `isolation="none"`, run in the one event loop that all samples share. A busy loop or a
blocking call in one of them freezes the rollout. A thread watches and reports; it interrupts nothing. If the
rollout stays frozen, the run's deadline (`--step-timeout-s`) ends it with the text of the note.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from slime.observe.samples import write_whole

logger = logging.getLogger(__name__)

#: packages that do not identify a component
_ON_EVERY_STACK = sys.stdlib_module_names | {"slime"}
#: seconds an event loop may be blocked
STALL_S = 30.0
#: a file in the run folder that names the code blocking the event loop, while it is blocked
STALL_NOTE = Path("logs", "rollout-stalled.txt")


class StallWatch:
    """Watches the event loop that `start` is called in."""

    def __init__(self, components: Mapping[str, object], *, stall_s: float = STALL_S, note: Path | None = None) -> None:
        """Does not start watching yet.

        Args:
            components: The components that run in the loop, by their names in messages.
            stall_s: Seconds the loop may be blocked.
            note: A file that names the code blocking the loop, while it is blocked.
        """
        packages = {_package(type(component).__module__): name for name, component in components.items()}
        self._packages = {package: name for package, name in packages.items() if package not in _ON_EVERY_STACK}
        self._note = note
        self._stall_s = stall_s
        self._every_s = stall_s / 10
        self._alive_at = 0.0
        self._stop = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start watching; does nothing if already started."""
        if self._thread is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._tick()
        self._thread = threading.Thread(
            target=self._watch, args=(threading.get_ident(),), name="slime-stall-watch", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._alive_at = time.monotonic()
        self._timer = self._loop.call_later(self._every_s, self._tick)

    def _watch(self, thread_id: int) -> None:
        """Runs in the watching thread. Each stall is reported once."""
        reported_at = None
        while not self._stop.wait(self._every_s) and not self._loop.is_closed():
            alive_at = self._alive_at
            stalled_s = time.monotonic() - alive_at
            if stalled_s >= self._stall_s and reported_at != alive_at:
                reported_at = alive_at
                self._report(sys._current_frames().get(thread_id), stalled_s)
            elif stalled_s < self._stall_s and reported_at is not None:
                reported_at = None
                self._write_note(None)

    def _report(self, frame: FrameType | None, stalled_s: float) -> None:
        if frame is None:
            return
        name = self._component(frame)
        problem = "the event loop of the rollout has been blocked" if name is None else f"{name} has not returned"
        logger.error(
            "%s for %.1f s, and no sample makes progress. Stack:\n%s",
            problem,
            stalled_s,
            "".join(traceback.format_stack(frame)),
        )
        outside = (caller for caller in _callers(frame) if _package_of(caller) not in sys.stdlib_module_names)
        caller = next(outside, frame)
        where = f"{caller.f_code.co_filename}:{caller.f_lineno} in {caller.f_code.co_qualname}"
        self._write_note(f"{problem} for {stalled_s:.0f} s, at {where}")

    def _component(self, frame: FrameType) -> str | None:
        """The running component: the innermost whose boundary is on the stack, otherwise the owner of the code."""
        for caller in _callers(frame):
            boundary = caller.f_locals.get("self")
            if type(boundary).__module__.startswith("slime.rollout."):
                name = getattr(boundary, "component_name", None)
                if isinstance(name, str):
                    return name
        packages = map(_package_of, _callers(frame))
        return next((self._packages[package] for package in packages if package in self._packages), None)

    def _write_note(self, text: str | None) -> None:
        """Write the note, or remove it."""
        if self._note is None:
            return
        try:
            if text is None:
                self._note.unlink(missing_ok=True)
            else:
                write_whole(self._note, text.encode())
        except OSError as error:  # the log has it
            logger.warning("%s cannot be written: %s", self._note, error)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _package_of(frame: FrameType) -> str:
    return _package(str(frame.f_globals.get("__name__")))


def _package(module: str) -> str:
    """The top-level package of a module."""
    return module.partition(".")[0]
