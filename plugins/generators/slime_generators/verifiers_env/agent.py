"""Runs episodes in the process of a verifiers environment, and starts and ends that process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

from slime.kit.processes import end_group
from slime_generators.agents.task import AgentTask
from slime_generators.options import VerifiersOptions

_WORKER = Path(__file__).with_name("worker.py")
#: maximum bytes of one answer
_MAX_BYTES = 64 * 2**20
#: seconds until the process must have ended by itself
_ENDING_S = 2.0


class VerifiersAgent:
    """Runs a sample's task in the worker process, which is started for the first task and restarted if it dies."""

    def __init__(self, options: VerifiersOptions) -> None:
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._open: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = count()

    async def __call__(self, task: AgentTask) -> object:
        """Run an episode and return its reward and metrics.

        Raises:
            ValueError: The sample's metadata names no task.
            RuntimeError: The episode failed, or the process ended.
        """
        task_id = task.metadata.get("verifiers")
        if not isinstance(task_id, dict) or not task_id.keys() >= {"idx", "key"}:
            raise ValueError(
                "the sample's metadata names no task. Write rows for --prompt-data with"
                " `python -m slime_generators.verifiers_env.rows`"
            )
        process = await self.start()
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            request = {"op": "episode", "base_url": task.base_url, "model": task.model, **task_id}
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
        """The process with the loaded environment. Raises `RuntimeError` if it cannot be started or loaded."""
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
    """Start the worker process and send it the settings.

    Args:
        options: The environment.
        rows: Write this many rows of a prompt file instead of running episodes; -1: all.

    Raises:
        RuntimeError: The Python that `options` names cannot be started.
    """
    python = options.python or sys.executable
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            "-P",  # keep this folder's files from shadowing modules
            str(_WORKER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_BYTES,
            start_new_session=True,
        )
    except OSError as error:
        raise RuntimeError(f"python = {python!r} of verifiers_env cannot be started: {error}") from error
    settings = options.model_dump(mode="json", include={"taskset", "env", "path"})
    await _send(process, {**settings, "rows": rows})
    return process


async def answers_of(process: asyncio.subprocess.Process) -> AsyncIterator[dict[str, Any]]:
    """The worker's answers, until it ends."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        yield json.loads(line)


async def end_worker(process: asyncio.subprocess.Process) -> None:
    """End the worker and all processes that it has started."""
    await end_group(process, _ENDING_S)


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
        " its output is in logs/rollout.log of the run"
    )
