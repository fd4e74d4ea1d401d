"""Names what blocks the event loop of the rollout.

Generators, and rewards with `isolation="none"`, run in the one event loop that all samples share. A busy loop or a
blocking call in one of them freezes the rollout. The process's pulse says so, where the driver reads it and ends the
run.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Mapping
from types import FrameType

from slime.kit.processes import pulse
from slime.kit.processes.pulse import ThreadClock, callers, package_of

#: packages that do not identify a component
_ON_EVERY_STACK = sys.stdlib_module_names | {"slime"}


class StallWatch:
    """Has the pulse watch the event loop that `start` is called in."""

    def __init__(self, components: Mapping[str, object]) -> None:
        """`components`: those that run in the loop, by their names in messages."""
        packages = {type(component).__module__.partition(".")[0]: name for name, component in components.items()}
        self._packages = {package: name for package, name in packages.items() if package not in _ON_EVERY_STACK}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start watching; does nothing if already started."""
        if self._timer is None:
            self._loop = asyncio.get_running_loop()
            self._clock = ThreadClock(threading.current_thread())
            self._tick()
            pulse.PULSE.watch(self._clock, self._describe)

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            pulse.PULSE.unwatch()
            self._timer.cancel()

    def _tick(self) -> None:
        self._clock.alive()
        self._timer = self._loop.call_later(pulse.BEAT_S, self._tick)

    def _describe(self, frame: FrameType) -> str:
        name = self._component(frame)
        return "the event loop of the rollout has been blocked" if name is None else f"{name} has not returned"

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
