"""A disk without space, for one function in a process of its own."""

from __future__ import annotations

import multiprocessing
import resource
import signal
from collections.abc import Callable
from typing import Any


def on_a_small_disk(function: Callable[..., Any], *arguments: Any, file_bytes: int = 4096) -> str | None:
    """The message of the error of `function(*arguments)` if no file may grow beyond `file_bytes`; None if none came.

    The kernel refuses the write in the middle of a file, as on a full disk; only the number of the error differs.
    """
    context = multiprocessing.get_context("fork")
    pipe, child = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(child, function, arguments, file_bytes))
    process.start()
    child.close()
    try:
        message: str | None = pipe.recv()
    finally:
        process.join(60)
    return message


def limit_files(file_bytes: int) -> None:
    """Let no file of this process grow beyond `file_bytes`."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))


def _run(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...], file_bytes: int) -> None:
    limit_files(file_bytes)
    try:
        function(*arguments)
        pipe.send(None)
    except Exception as error:  # noqa: BLE001 - its message is the result
        pipe.send(str(error))
