"""Ctrl-C and SIGTERM: both end a run in an orderly way, at any time, and neither interrupts its shutdown.

The first is acknowledged at once, even while the main thread waits for something, and a third ends everything at once.
A run that saves checkpoints answers SIGTERM itself while it trains: `slime.run.preemption`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from slime.errors import TerminatedInterrupt

if TYPE_CHECKING:
    from slime.run.preemption import Preemption

#: seconds that Ray may take to start after an interruption; on a very busy machine it took 41, and it gives up after 60
_START_S = 50.0
#: seconds to wait for the answering thread. It may not end: a forked process can hold the pipe open, and printing
#: blocks while nobody reads.
_ANSWERING_S = 1.0
_ANSWERS = (
    "slime: {}: ending the run without saving, which can take a minute; {} twice more ends it at once",
    "slime: still ending the run; {1} once more ends it at once, without cleaning up",
    "slime: ended at once",
)
#: what a signal is called, how a user sends it, and the exit code of what it ends
_INTERRUPTIONS: dict[int, tuple[str, str, int]] = {
    signal.SIGINT: ("interrupted", "Ctrl-C", 130),
    signal.SIGTERM: ("SIGTERM", "SIGTERM", 143),
}


@contextmanager
def ending_on_signals(preemption: Preemption | None = None) -> Iterator[threading.Event]:
    """In the body, SIGTERM raises a `KeyboardInterrupt`, as Ctrl-C does; the third of either ends all at once.

    Only for the main thread.

    Args:
        preemption: While it accepts SIGTERM, it alone answers it.

    Yields:
        Set once the run was interrupted, also while `uninterrupted` drops what interrupts it.
    """

    ended_by_sigterm = False

    def terminate(signum: int, frame: FrameType | None) -> None:
        nonlocal ended_by_sigterm
        del signum, frame
        if preemption is None or not preemption.accepts:
            ended_by_sigterm = True
            raise TerminatedInterrupt

    before, interrupted = signal.signal(signal.SIGTERM, terminate), threading.Event()
    # Python calls its handlers only between two instructions of the main thread, which may be waiting in Ray for a
    # second. The numbers of signals are written to this pipe as they arrive, and another thread reads it.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    arguments = reader, preemption, interrupted
    answering = threading.Thread(target=_answer, args=arguments, name="answer-signals", daemon=True)
    answering.start()
    try:
        yield interrupted
    except KeyboardInterrupt as interruption:
        # While Ray waits in C++, it replaces what a handler raises by a plain KeyboardInterrupt of its own.
        if ended_by_sigterm and not isinstance(interruption, TerminatedInterrupt):
            raise TerminatedInterrupt from interruption
        raise
    finally:
        signal.set_wakeup_fd(earlier)
        signal.signal(signal.SIGTERM, before)
        os.close(writer)
        answering.join(_ANSWERING_S)


def _answer(reader: int, preemption: Preemption | None, interrupted: threading.Event) -> None:
    """Answer each interruption that is read; the last answer ends the run."""
    answers = iter(_ANSWERS)
    with open(reader, "rb", buffering=0) as arriving:
        while numbers := arriving.read(1):
            if numbers[0] == signal.SIGTERM and preemption is not None and preemption.accepts:
                say(preemption.ask())
            elif (named := _INTERRUPTIONS.get(numbers[0])) is not None:
                interrupted.set()
                answer = next(answers)
                say(answer.format(*named))
                if answer is _ANSWERS[-1]:
                    end_at_once(named[-1])


def say(answer: str) -> None:
    """Print a line to standard error, from any thread."""
    # Not through Python's streams, whose locks the main thread may hold; below an unfinished line.
    with suppress(OSError):
        os.write(2, f"{chr(10) if os.isatty(2) else ''}{answer}\n".encode())


def end_at_once(code: int) -> None:
    """SIGKILL every process that this one has started, directly or not, and exit with `code`."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(code)


@contextmanager
def interruptions_deferred(limit_s: float = _START_S) -> Iterator[None]:
    """The first SIGINT or SIGTERM in the body is handled after it, by the handler from before; the second at once.

    If the body does not end within `limit_s` seconds after the first, all processes of the run are ended: the signal
    may have ended a daemon that Ray waits for.

    Only for the main thread, around the start of Ray, which an exception in its midst breaks in two ways. If it is
    raised between taking a lock and the `try` that releases it, the lock of `logging` stays taken, and every other
    thread waits for it: runs hung so. If it is raised while `subprocess` forks a daemon, Python drops it, and the run
    goes on.
    """
    arrived: int | None = None

    def handle(signum: int, frame: FrameType | None) -> None:
        if callable(handler := before[signal.Signals(signum)]):
            handler(signum, frame)
        elif handler is not signal.SIG_IGN:
            raise TerminatedInterrupt if signum == signal.SIGTERM else KeyboardInterrupt

    def defer(signum: int, frame: FrameType | None) -> None:
        nonlocal arrived
        if arrived is not None:
            handle(signum, frame)
        elif before[signal.Signals(signum)] is not signal.SIG_IGN:
            arrived = signum
            last_resort.start()

    def end() -> None:
        say(f"slime: ended at once: Ray has not started within {limit_s:g} s after the interruption")
        end_at_once(_INTERRUPTIONS[signal.Signals(arrived or signal.SIGINT)][-1])

    last_resort = threading.Timer(limit_s, end)
    last_resort.daemon = True
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    for signum in before:
        signal.signal(signum, defer)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        last_resort.cancel()
        if arrived is not None:
            handle(arrived, None)  # replaces an error of the body, which may be the signal's doing


@contextmanager
def uninterrupted() -> Iterator[None]:
    """In the body, SIGINT and SIGTERM do not raise. Only for the main thread."""

    def ignore(signum: int, frame: FrameType | None) -> None:
        # Not SIG_IGN, with which `ending_on_signals` would not learn of the signal.
        del signum, frame

    before = {signum: signal.signal(signum, ignore) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
