"""Notices when the rollout's event loop stands still, says in whose code, and frees it where that is safe.

Generators, and rewards with `isolation="none"`, run in the one event loop that all samples share: a busy loop in one
of them would freeze the run without a word.  A thread watches.  Where the innermost frame outside the standard library
belongs to such a component, it is told to raise there (PyThreadState_SetAsyncExc), which costs its sample.  Python does
that at the next bytecode, so it ends busy loops, and waits in C code only when they return.  Everywhere else the thread
only reports: raising in slime's or asyncio's own code could break more than it mends.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType, FunctionType, MethodType
from typing import Any, ClassVar

from slime.errors import PluginError

logger = logging.getLogger(__name__)

#: seconds an event loop may stand still
STALL_S = 30.0
#: where, in the run folder, it stands who holds the event loop, while somebody does
STALL_NOTE = Path("logs", "rollout-held.txt")
#: attempts to free it in one stall
ATTEMPTS = 3

_STDLIB = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib"))
_SLIME = Path(__file__).resolve().parents[1]


class LoopHeldError(PluginError):
    """Raised inside a component that does not let go of the event loop."""

    text: ClassVar[str] = ""

    def __str__(self) -> str:
        return self.text


class LoopWatchdog:
    """Watches the event loop that `start` is called in."""

    def __init__(self, components: Mapping[str, object], *, stall_s: float = STALL_S, note: Path | None = None) -> None:
        """`components`: what runs in the loop, by the title that messages call it.

        `note`: a file that says where the loop stands still, as long as it does.
        """
        self._note = note
        self._code = {title: set(code_places(component)) for title, component in components.items()}
        self._stall_s = stall_s
        self._every_s = stall_s / 10
        self._beat_at = 0.0
        self._stop = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start watching; harmless when it has been started."""
        if self._thread is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._beat()
        self._thread = threading.Thread(
            target=self._watch, args=(threading.get_ident(),), name="slime-loop-watchdog", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        self._timer = self._loop.call_later(self._every_s, self._beat)

    def _watch(self, thread_id: int) -> None:
        """The watching thread."""
        noticed, attempts = 0.0, 0
        while not self._stop.wait(self._every_s) and not self._loop.is_closed():
            beat_at = self._beat_at
            still_s = time.monotonic() - beat_at
            if still_s < self._stall_s:
                if attempts:
                    attempts = 0
                    self._tell(None)
                continue
            attempts = attempts + 1 if beat_at == noticed else 1
            noticed = beat_at
            if attempts <= ATTEMPTS:
                self._act(thread_id, still_s)

    def _act(self, thread_id: int, still_s: float) -> None:
        frame = sys._current_frames().get(thread_id)
        if frame is None:
            return
        culprit = self._culprit(frame)
        if culprit is None:
            stack = "".join(traceback.format_stack(frame))
            who = called(frame)
            waits = "the event loop of the rollout has stood still" if who is None else f"{who} has not returned"
            logger.error("%s for %.1f s, here:\n%s", waits, still_s, stack)
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
            self._tell(f"{waits} for {still_s:.0f} s, at {place}")
            return
        title, place = culprit
        text = f"held the event loop of the rollout for {still_s:.1f} s at {place}, so that no sample could go on"
        error = type("LoopHeldError", (LoopHeldError,), {"text": text})
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(error))
        logger.error("%s %s; its sample is failed", title, text)
        self._tell(f"{title} {text}")

    def _tell(self, text: str | None) -> None:
        """Write the note, or remove it."""
        if self._note is None:
            return
        try:
            if text is None:
                self._note.unlink(missing_ok=True)
            else:
                self._note.write_text(text, encoding="utf-8")
        except OSError as error:  # the log has it
            logger.warning("%s cannot be written: %s", self._note, error)

    def _culprit(self, frame: FrameType) -> tuple[str, str] | None:
        """(component, `FILE:LINE`) where the innermost frame outside the standard library is a component's."""
        current: FrameType | None = frame
        while current is not None and _is_stdlib(current.f_code.co_filename):
            current = current.f_back
        if current is None:
            return None
        file = Path(current.f_code.co_filename)
        for title, places in self._code.items():
            if file in places or any(parent in places for parent in file.parents):
                return title, f"{file}:{current.f_lineno} in {current.f_code.co_qualname}"
        return None


def called(frame: FrameType) -> str | None:
    """The component whose boundary is innermost on a stack: data sources, filters and functions over a batch."""
    current: FrameType | None = frame
    while current is not None:
        boundary = current.f_locals.get("self")
        if type(boundary).__module__.startswith("slime.rollout.") and isinstance(who := _who(boundary), str):
            return who
        current = current.f_back
    return None


def _who(boundary: object) -> object:
    return getattr(boundary, "who", None)


def code_places(component: object) -> Iterator[Path]:
    """Folders and files with a component's code: its class's package, and functions it holds; slime's own excepted."""
    module = sys.modules.get(type(component).__module__)
    yield from _not_slime(_place_of(module))
    for value in list(getattr(component, "__dict__", {}).values()):
        function = value.__func__ if isinstance(value, MethodType) else value
        if isinstance(function, FunctionType):
            yield from _not_slime(Path(function.__code__.co_filename))


def _place_of(module: Any) -> Path | None:
    """The folder of a module's top-level package, or the file of a module that is in none."""
    top = sys.modules.get(module.__name__.partition(".")[0]) if module is not None else None
    file = getattr(top, "__file__", None) or getattr(module, "__file__", None)
    if file is None:
        return None
    return Path(file).parent if hasattr(top, "__path__") else Path(file)


def _not_slime(place: Path | None) -> Iterable[Path]:
    return [] if place is None or place.resolve().is_relative_to(_SLIME) else [place]


def _is_stdlib(filename: str) -> bool:
    return filename.startswith(("<frozen", *_STDLIB)) and "site-packages" not in filename
