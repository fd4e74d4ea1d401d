"""Another user of the machine."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - what connecting to an address imports, which another user may not be able to read
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

#: user and group of nobody
_NOBODY = 65534


def as_stranger(work: Callable[[], Any]) -> Any:
    """What `work` returns in another process, of another user if the tests run as root.

    The process is forked, because another user may not be able to read this Python.
    """
    here, there = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
        there.send(work())

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join(30)
