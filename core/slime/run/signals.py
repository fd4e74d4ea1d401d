"""Ctrl-C and SIGTERM: both end a run in an orderly way, at any time, and neither interrupts its shutdown."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """In the body, SIGTERM raises `KeyboardInterrupt`, as Ctrl-C does. Only for the main thread."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interruptions_kept() -> Iterator[None]:
    """In the body, SIGINT and SIGTERM raise `KeyboardInterrupt` at once, and again at its end if that was dropped.

    Python drops what a signal handler raises while `subprocess` forks with a `preexec_fn`, as Ray does for each of its
    daemons: on a busy machine, 2 of 16 runs ignored a Ctrl-C while Ray started. Only for the main thread.
    """
    interrupted = False

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.default_int_handler(signum, frame)

    def report_dropped(dropped: UnraisableHookArgs) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            report(dropped)

    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    report, sys.unraisablehook = sys.unraisablehook, report_dropped
    try:
        yield
    except Exception:
        if not interrupted:
            raise
    finally:
        sys.unraisablehook = report
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if interrupted:
        raise KeyboardInterrupt


@contextmanager
def uninterrupted() -> Iterator[None]:
    """In the body, SIGINT and SIGTERM are ignored. Only for the main thread."""
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
