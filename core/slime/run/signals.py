"""Ctrl-C and SIGTERM: both end a run in an orderly way, and neither interrupts its shutdown."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """In the body, SIGTERM raises `KeyboardInterrupt`, as Ctrl-C does. Only for the main thread."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """In the body, SIGINT and SIGTERM are ignored. Only for the main thread."""
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
