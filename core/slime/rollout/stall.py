"""Reports a blocked event loop: for how long, in which component's code, with the stack.

Generators, and rewards with `isolation="none"`, run in the one event loop that all samples share. A busy loop or a
blocking call in one of them freezes the rollout. A thread watches and reports, to the log and in the process's pulse,
where the driver reads it and ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from types import FrameType

from slime.kit.processes.pulse import PULSE, ThreadClock, callers, package_of, position

logger = logging.getLogger(__name__)

#: packages that do not identify a component
_ON_EVERY_STACK = sys.stdlib_module_names | {"slime"}


def _tell(stalled: str | None) -> None:
    PULSE.say(stalled=stalled)


class StallWatch:
    """Watches the event loop that `start` is called in."""

    def __init__(
        self, components: Mapping[str, object], *, stall_s: float, tell: Callable[[str | None], None] = _tell
    ) -> None:
        """Does not start watching yet.

        Args:
            components: The components that run in the loop, by their names in messages.
            stall_s: Seconds the loop may be blocked.
            tell: Gets a line that names the code blocking the loop, and None when the loop runs again.
        """
        packages = {type(component).__module__.partition(".")[0]: name for name, component in components.items()}
        self._packages = {package: name for package, name in packages.items() if package not in _ON_EVERY_STACK}
        self._tell = tell
        self._stall_s = stall_s
        self._every_s = stall_s / 10
        self._stop = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start watching; does nothing if already started."""
        if self._thread is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._clock = ThreadClock(threading.current_thread())
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
        self._clock.alive()
        self._timer = self._loop.call_later(self._every_s, self._tick)

    def _watch(self, thread_id: int) -> None:
        """Runs in the watching thread. Each stall is reported once."""
        reported_at = None
        while not self._stop.wait(self._every_s) and not self._loop.is_closed():
            alive_at = self._clock.at
            if reported_at not in (None, alive_at):
                reported_at = None
                self._tell(None)
            if reported_at is None and self._clock.hangs(self._stall_s):
                reported_at = alive_at
                self._report(sys._current_frames().get(thread_id), self._clock.silent_s)

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
        self._tell(f"{problem} for {stalled_s:.0f} s, at {position(frame)}")

    def _component(self, frame: FrameType) -> str | None:
        """The running component: the innermost whose boundary is on the stack, otherwise the owner of the code."""
        for caller in callers(frame):
            boundary = caller.f_locals.get("self")
            if type(boundary).__module__.startswith("slime.rollout."):
                name = getattr(boundary, "component_name", None)
                if isinstance(name, str):
                    return name
        packages = map(package_of, callers(frame))
        return next((self._packages[package] for package in packages if package in self._packages), None)
