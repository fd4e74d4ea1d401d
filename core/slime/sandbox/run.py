"""Runs one program in a locked-down process and tells what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from slime.errors import SandboxError
from slime.sandbox.inside.main import ANSWER
from slime.sandbox.limits import Isolation, Limits
from slime.sandbox.machine import killed_after, launcher_argv, machine_isolation
from slime.sandbox.outcome import Outcome
from slime.sandbox.place import new_place, own_place, remove_place

#: seconds that starting and ending may take beside the program's own time, on a busy machine
_SPARE_S = 30.0
_NO_FILES: Mapping[str, bytes] = {}


async def run_program(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] = _NO_FILES,
    limits: Limits | None = None,
    readable: Sequence[str | Path] = (),
    require: Isolation = Isolation.LIMITS,
    isolation: Isolation | None = None,
) -> Outcome:
    """Run an untrusted program; whatever it does, this returns within `limits.wall_s` and some seconds.

    argv        the program by its absolute path, and its arguments
    stdin       what it reads on standard input
    files       name -> content, in its working folder, where it may write as well
    limits      default: `Limits()`
    readable    folders and files beside the system's and Python's own that it may read, where namespaces hide the rest
    require     the least isolation to run it with
    isolation   default: the best that this machine permits (`machine_isolation`)

    Raises `SandboxError` where the machine does not permit what is required, and where the program cannot be started.
    When the call is cancelled, the program ends.
    """
    allowed = limits or Limits()
    level = await asyncio.to_thread(_level, require, isolation)  # the first time it tries out the machine
    place = new_place()
    try:
        request = _request(argv, stdin, files, allowed, readable, place, level)
        process = await asyncio.create_subprocess_exec(
            *launcher_argv(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={},
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(ConnectionError):  # then its answer, or the lack of one, says more
                process.stdin.write(request)
                await process.stdin.drain()
            async with asyncio.timeout(allowed.wall_s + _SPARE_S):
                answer = await process.stdout.read()
        except TimeoutError:
            raise _no_answer(argv, allowed) from None
        finally:
            # The lifeline: what still runs is ended from within.
            process.stdin.close()
            await asyncio.shield(_ended(process))
    finally:
        # Beside the event loop: it may be a large tree.
        await asyncio.shield(asyncio.to_thread(remove_place, place))
    return _outcome(argv, answer, level)


def run_program_sync(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] = _NO_FILES,
    limits: Limits | None = None,
    readable: Sequence[str | Path] = (),
    require: Isolation = Isolation.LIMITS,
    isolation: Isolation | None = None,
) -> Outcome:
    """`run_program` for code without an event loop."""
    allowed = limits or Limits()
    level = _level(require, isolation)
    with own_place() as place:
        request = _request(argv, stdin, files, allowed, readable, place, level)
        with (
            subprocess.Popen(
                launcher_argv(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={},
                start_new_session=True,
            ) as process,
            killed_after(process, allowed.wall_s + _SPARE_S) as late,
        ):
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.flush()
            answer = process.stdout.read()
        if late.is_set():
            raise _no_answer(argv, allowed)
    return _outcome(argv, answer, level)


def python_argv(*arguments: str) -> list[str]:
    """The command that runs this process's Python with its installed libraries and nothing of the user's."""
    return [sys.executable, "-s", "-P", "-B", *arguments]


def _level(require: Isolation, isolation: Isolation | None) -> Isolation:
    machine = machine_isolation()
    level = machine.isolation if isolation is None else isolation
    if level.rank < require.rank:
        raise SandboxError(
            f"untrusted programs shall run with isolation {require.value!r}, and here only {level.value!r} is to be had"
            f" ({machine.reason or 'as asked for'}). SECURITY.md says what each of them stops and what makes them work."
        )
    return level


def _request(
    argv: Sequence[str],
    stdin: bytes,
    files: Mapping[str, bytes],
    limits: Limits,
    readable: Sequence[str | Path],
    place: str,
    level: Isolation,
) -> bytes:
    for name in files:
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise ValueError(f"file {name!r} is outside the program's working folder")
    content = marshal.dumps(
        {
            "argv": list(argv),
            "stdin": stdin,
            "files": dict(files),
            "limits": asdict(limits),
            "readable": [*_python_folders(), *map(str, readable)],
            "place": place,
            "level": level.value,
        }
    )
    return len(content).to_bytes(8, "little") + content


def _python_folders() -> list[str]:
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    folders |= {os.path.realpath(folder) for folder in folders}
    folders.add(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    return sorted(folder for folder in folders if folder != "/")


def _outcome(argv: Sequence[str], told: bytes, level: Isolation) -> Outcome:
    before, mark, packed = told.partition(b"\n" + ANSWER)
    if not mark:
        raise SandboxError(
            f"the process that watches over {argv[0]} ended without an answer:"
            f" {before.decode(errors='replace')[-500:].strip() or 'it was killed, by whom is not known'}"
        )
    answer = marshal.loads(packed)
    if "refused" in answer:
        raise SandboxError(
            f"{argv[0]} cannot be started with isolation {level.value!r}: {answer['refused']}. The program must be"
            " given by its absolute path, and be readable for a user without rights."
        )
    if "lost" in answer:  # process 1 was killed: by the kernel, for want of memory
        return Outcome("memory", None, b"", b"", 0.0, 0.0, 0.0, level)
    return Outcome(**answer, isolation=level)


def _no_answer(argv: Sequence[str], limits: Limits) -> SandboxError:
    return SandboxError(f"{argv[0]}: no answer {_SPARE_S:g} s after its time of {limits.wall_s:g} s was over")


async def _ended(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(_SPARE_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
