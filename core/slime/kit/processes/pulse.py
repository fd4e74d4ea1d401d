"""What a process says about itself to those who watch it: a page of memory that a thread of its own renews.

A watcher on the same machine reads the page as `/proc/PID/fd/N`, even while the process is stopped or native code keeps
its interpreter busy. Nothing is on disk, so a full disk stops no pulse, and nothing is left when the process ends.

A beat that stays away is not yet a hang: on a busy machine the thread may wait for its turn. `idle_too_long` decides.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

#: seconds between two beats
BEAT_S = 0.5
#: makes a process write the stacks of all its threads to its log
STACK_SIGNAL = signal.SIGUSR2
#: share of a time limit that a process must have computed, or slept through, before it counts as hung: a process that
#: merely waits for a turn on a busy machine does neither
_COMPUTED_SHARE = 0.25
#: share of a time limit that counts at most between two looks
_GAP_SHARE = 0.2

logger = logging.getLogger(__name__)


def idle_too_long(silent_s: float, computed_s: float, state: str, limit_s: float) -> bool:
    """Whether something that should have been heard of `silent_s` ago hangs.

    Args:
        silent_s: Seconds since its last sign of life.
        computed_s: Seconds of processor time that it has used since.
        state: Its state in `/proc/PID/stat`: S sleeps, D waits for a disk, R computes or waits for a processor.
        limit_s: Seconds that it may be silent.
    """
    return silent_s >= limit_s and (state == "S" or computed_s >= _COMPUTED_SHARE * limit_s)


class ThreadClock:
    """How long one thread of this process has been silent, as seen by another that asks again and again.

    The time between two questions counts only up to a part of the limit. If all of the process was stopped meanwhile,
    as batch systems and containers do, no thread is to blame.
    """

    def __init__(self, thread: threading.Thread) -> None:
        """`thread` must be running; its last sign of life is now."""
        assert thread.ident is not None
        self.ident = thread.ident
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self._stat = f"/proc/self/task/{thread.native_id}/stat"
        #: the sign of life that the silence was counted from, when it was last counted, and its seconds
        self._counted = 0.0, 0.0, 0.0
        self.alive()

    def alive(self) -> None:
        """Record a sign of life."""
        self.at, self._computed = time.monotonic(), time.clock_gettime(self._clock)

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life, as counted by `hangs`."""
        return self._counted[2]

    def hangs(self, limit_s: float) -> bool:
        """Whether the thread hangs: see `idle_too_long`. Asked at least ten times in `limit_s`."""
        at, now = self.at, time.monotonic()
        since, asked_at, silent_s = self._counted if self._counted[0] == at else (at, at, 0.0)
        silent_s += min(now - asked_at, _GAP_SHARE * limit_s)
        self._counted = since, now, silent_s
        if silent_s < limit_s:
            return False
        state = Path(self._stat).read_text().rpartition(")")[2].split()[0]
        return idle_too_long(silent_s, time.clock_gettime(self._clock) - self._computed, state, limit_s)


class Pulse:
    """This process's page."""

    def __init__(self) -> None:
        """Nothing beats, and nobody reads the page, before `start`."""
        self._fields: dict[str, Any] = {}
        self._page: int | None = None
        self._each_beat: list[Callable[[], None]] = []
        #: the clock of the thread that is watched, and what says what hangs in it
        self._watched: tuple[ThreadClock, Callable[[FrameType], str]] | None = None
        #: the last sign of life of the thread, if it is known to hang
        self._hung_at: float | None = None

    def start(self, stall_s: float) -> int:
        """Begin to beat, and answer `STACK_SIGNAL`.

        Args:
            stall_s: Seconds that a thread may be silent: see `watch`.

        Returns:
            The page's descriptor.
        """
        faulthandler.register(STACK_SIGNAL, all_threads=True)
        self._page = os.memfd_create("slime-pulse")
        self._stall_s = stall_s
        self._write()
        threading.Thread(target=self._beat, name="slime-pulse", daemon=True).start()
        return self._page

    def say(self, **fields: Any) -> None:
        """Set fields of the page, from the next beat on."""
        self._fields = {**self._fields, **fields}

    def each_beat(self, action: Callable[[], None]) -> None:
        """Call `action` before every beat."""
        self._each_beat.append(action)

    def watch(self, clock: ThreadClock, describe: Callable[[FrameType], str]) -> None:
        """Say so on the page, as `stalled`, while a thread hangs, and log its stack.

        Args:
            clock: Its clock.
            describe: Says what hangs, given the thread's innermost frame: "reward math has not returned".
        """
        self._watched, self._hung_at = (clock, describe), None

    def unwatch(self) -> None:
        """Watch no thread any more."""
        self._watched = None

    @contextlib.contextmanager
    def inside(self, component_name: str) -> Iterator[None]:
        """Watch a call of a component by this thread."""
        self.watch(ThreadClock(threading.current_thread()), lambda _: f"{component_name} has not returned")
        try:
            yield
        finally:
            self.unwatch()

    def _beat(self) -> None:
        reported = False
        while True:
            time.sleep(BEAT_S)
            try:
                for action in self._each_beat:
                    action()
                self._look()
            except Exception:  # without a beat a process counts as hung: it may have run out of descriptors only
                if not reported:
                    logger.exception("This process could not say everything about its state.")
                reported = True
            self._write()

    def _look(self) -> None:
        watched = self._watched
        if watched is None:
            return
        clock, describe = watched
        alive_at = clock.at
        if self._hung_at not in (None, alive_at):
            self._hung_at = None
            self.say(stalled=None)
        if self._hung_at is None and clock.hangs(self._stall_s):
            frame = sys._current_frames().get(clock.ident)
            if frame is not None and self._watched is watched:
                stalled = f"{describe(frame)} for {clock.silent_s:.0f} s, at {position(frame)}"
                stack = "".join(traceback.format_stack(frame))
                self._hung_at = alive_at
                self.say(stalled=stalled)
                self._write()  # before the log: what hangs may hold its lock
                logger.error("%s. Stack:\n%s", stalled, stack)

    def _write(self) -> None:
        assert self._page is not None
        # One line: what an earlier, longer one left behind it is not read.
        os.pwrite(self._page, json.dumps({"beat": time.monotonic(), **self._fields}).encode() + b"\n", 0)


#: the page of this process
PULSE = Pulse()


def read_pulse(pid: int, page: int) -> dict[str, Any] | None:
    """What a process of this machine says; None if it has ended, or is just writing."""
    try:
        with Path(f"/proc/{pid}/fd/{page}").open("rb") as file:
            said: dict[str, Any] = json.loads(file.readline())
    except (OSError, ValueError):
        return None
    return said


def position(frame: FrameType) -> str:
    """`FILE:LINE in FUNCTION` of the innermost code that is not the standard library's."""
    outside = (caller for caller in callers(frame) if package_of(caller) not in sys.stdlib_module_names)
    caller = next(outside, frame)
    return f"{caller.f_code.co_filename}:{caller.f_lineno} in {caller.f_code.co_qualname}"


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def package_of(frame: FrameType) -> str:
    """The top-level package of a frame's code."""
    return str(frame.f_globals.get("__name__")).partition(".")[0]
