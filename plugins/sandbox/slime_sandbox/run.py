"""Runs one program in a locked-down process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from slime.errors import SandboxError
from slime_sandbox.launcher import NO_FILES, Launcher, python_folders
from slime_sandbox.limits import Isolation, Limits, Outcome
from slime_sandbox.machine import machine_isolation

#: one thread waits for each program of `run_program`
_THREADS = ThreadPoolExecutor(256, thread_name_prefix="slime-sandbox")


async def run_program(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] = NO_FILES,
    limits: Limits | None = None,
    readable: Sequence[str | Path] = (),
    require: Isolation = Isolation.LIMITS,
    isolation: Isolation | None = None,
) -> Outcome:
    """Run an untrusted program. Returns within `limits.wall_s` and a few seconds, whatever the program does.

    Cancelling the call ends the program.

    Args:
        argv: The program by its absolute path, and its arguments.
        stdin: Its standard input.
        files: Name to content, in its working folder, where it can also write.
        limits: Default: `Limits()`.
        readable: Folders and files that it may read, in addition to the system's and Python's own. Only needed with
            namespaces, which hide everything else.
        require: The least isolation to accept.
        isolation: Default: the best that this machine permits (`machine_isolation`).

    Raises:
        SandboxError: If the machine does not permit the required isolation, or the program cannot be started.
    """
    with Launcher() as launcher:
        work = partial(
            run_program_sync,
            argv,
            stdin=stdin,
            files=files,
            limits=limits,
            readable=readable,
            require=require,
            isolation=isolation,
            launcher=launcher,
        )
        running = asyncio.get_running_loop().run_in_executor(_THREADS, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            launcher.abandon()
            await asyncio.gather(running, return_exceptions=True)
            raise


def run_program_sync(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] = NO_FILES,
    limits: Limits | None = None,
    readable: Sequence[str | Path] = (),
    require: Isolation = Isolation.LIMITS,
    isolation: Isolation | None = None,
    launcher: Launcher | None = None,
) -> Outcome:
    """`run_program` for code without an event loop. Another thread can end the program with `launcher.abandon()`."""
    machine = machine_isolation()
    level = machine.isolation if isolation is None else isolation
    if level.rank < require.rank:
        raise SandboxError(
            f"isolation {require.value!r} is required for untrusted programs, but only {level.value!r} is available"
            f" here ({machine.reason or 'as requested'}). SECURITY.md explains what each of them stops and needs."
        )
    for name in files:
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise ValueError(f"file {name!r} is outside the program's working folder")
    visible = [*python_folders(), *map(str, readable)]
    with launcher or Launcher() as started:
        return started.run(argv, level, limits or Limits(), stdin=stdin, files=files, readable=visible)
