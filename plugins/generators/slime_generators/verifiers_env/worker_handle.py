"""The process of a verifiers environment, seen from the rollout's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

from slime_generators.agents.task import AgentTask
from slime_generators.options import VerifiersOptions

_WORKER = Path(__file__).with_name("worker.py")
#: bytes of one answer
_LARGEST = 64 * 2**20
_ENDING_S = 2.0


class VerifiersAgent:
    """Plays a sample's task in the worker process, which is started with the first one and again after it died."""

    def __init__(self, options: VerifiersOptions) -> None:
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._open: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = count()

    async def __call__(self, task: AgentTask) -> object:
        """The environment's reward and metrics.

        Raises `ValueError` for a sample of another data set, `RuntimeError` for an episode that failed and for a
        process that ended.
        """
        which = task.metadata.get("verifiers")
        if not isinstance(which, dict) or not which.keys() >= {"idx", "key"}:
            raise ValueError(
                "the sample's metadata names no task; rows for --prompt-data are written by"
                " `python -m slime_generators.verifiers_env.rows`"
            )
        process = await self.start()
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            request = {"op": "episode", "base_url": task.base_url, "model": task.model, **which}
            await _send(process, {**request, "id": number})
            result = await answer
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):
                await _send(process, {"op": "cancel", "id": number})
            raise
        finally:
            self._open.pop(number, None)
        if "error" in result:
            raise RuntimeError(f"the environment failed: {result['error']}")
        return {"reward": result["reward"], "metrics": {f"verifiers/{k}": v for k, v in result["metrics"].items()}}

    async def start(self) -> asyncio.subprocess.Process:
        """The process, which has loaded the environment.  Raises `RuntimeError` where it cannot."""
        async with self._starting:
            return await self._running()

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        reading, self._reading = self._reading, None
        if process is not None:
            await end_worker(process)
        if reading is not None:
            await reading

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        if self._reading is not None:
            await self._reading
        process = await start_worker(self._options)
        try:
            async with asyncio.timeout(self._options.startup_timeout_s):
                first = await anext(answers_of(process), None)
        except TimeoutError:
            await end_worker(process)
            raise RuntimeError(
                f"the environment was not loaded in {self._options.startup_timeout_s:g} s (startup_timeout_s)"
            ) from None
        except BaseException:
            await end_worker(process)
            raise
        if first is None:
            raise RuntimeError(await _ended(process))
        self._process, self._reading = process, asyncio.ensure_future(self._read(process))
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        async for answer in answers_of(process):
            waiting = self._open.get(answer["id"])
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        ended = await _ended(process)
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(RuntimeError(ended))


async def start_worker(options: VerifiersOptions, rows: int | None = None) -> asyncio.subprocess.Process:
    """The worker process, told what to load.  `rows`: how many rows of a prompt file to write instead; -1: all.

    Raises `RuntimeError` where the Python that `options` name cannot be started.
    """
    python = options.python or sys.executable
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            "-P",  # this folder's files are no modules of the worker's
            str(_WORKER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LARGEST,
            start_new_session=True,
        )
    except OSError as error:
        raise RuntimeError(f"python = {python!r} of verifiers_env cannot be started: {error}") from error
    settings = options.model_dump(mode="json", include={"taskset", "env", "path"})
    await _send(process, {**settings, "rows": rows})
    return process


async def answers_of(process: asyncio.subprocess.Process) -> AsyncIterator[dict[str, Any]]:
    """What the worker says, until it ends."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        yield json.loads(line)


async def end_worker(process: asyncio.subprocess.Process) -> None:
    """End the worker and everything that it has started."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_ENDING_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _send(process: asyncio.subprocess.Process, request: dict[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()
    except ConnectionError:
        raise RuntimeError(await _ended(process)) from None


async def _ended(process: asyncio.subprocess.Process) -> str:
    return (
        f"the process of the verifiers environment ended with exit code {await process.wait()};"
        " what it said is in logs/rollout.log of the run"
    )
