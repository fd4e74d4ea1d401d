"""Runs episodes in the process of a verifiers environment, and starts and ends that process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

from slime.kit.processes import DirectChild, child, describe_exit, kill_group
from slime_generators.agents.task import AgentTask
from slime_generators.options import VerifiersOptions

_WORKER = Path(__file__).with_name("worker.py")
#: most bytes of one answer
_MAX_BYTES = 64 * 2**20
#: seconds the process has to end by itself
_ENDING_S = 2.0
#: the same, after it has closed its socket
_EXITING_S = 30.0


class VerifiersAgent:
    """Runs a sample's task in the worker process, which is started for the first task and restarted if it dies."""

    def __init__(self, options: VerifiersOptions) -> None:
        self._options = options
        self._worker: VerifiersWorker | None = None
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
        worker = await self.start()
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            request = {"op": "episode", "base_url": task.base_url, "model": task.model, **task_id}
            await worker.send({**request, "id": number})
            result = await answer
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):
                await worker.send({"op": "cancel", "id": number})
            raise
        finally:
            self._open.pop(number, None)
        if "error" in result:
            raise RuntimeError(f"the environment failed: {result['error']}")
        return {"reward": result["reward"], "metrics": {f"verifiers/{k}": v for k, v in result["metrics"].items()}}

    async def start(self) -> VerifiersWorker:
        """The process with the loaded environment. Raises `RuntimeError` if it cannot be started or loaded."""
        async with self._starting:
            return await self._running()

    async def close(self) -> None:
        """End the process."""
        worker, self._worker = self._worker, None
        reading, self._reading = self._reading, None
        if worker is not None:
            await worker.end()
        if reading is not None:
            await asyncio.shield(reading)

    async def _running(self) -> VerifiersWorker:
        if self._worker is not None and self._worker.running:
            return self._worker
        if self._reading is not None:
            await asyncio.shield(
                self._reading
            )  # the open episodes of all samples need it, even if this one is cancelled
        worker = await VerifiersWorker.start(self._options)
        try:
            async with asyncio.timeout(self._options.startup_timeout_s):
                first = await anext(worker.answers(), None)
        except TimeoutError:
            await worker.end()
            raise RuntimeError(
                f"the environment was not loaded in {self._options.startup_timeout_s:g} s (startup_timeout_s)"
            ) from None
        except BaseException:
            await worker.end()
            raise
        if first is None:
            raise RuntimeError(await worker.end(exiting=True))
        self._worker, self._reading = worker, asyncio.ensure_future(self._read(worker))
        return worker

    async def _read(self, worker: VerifiersWorker) -> None:
        """Hand out the answers until the process ends or sends something else, then fail the open episodes."""
        problem = ""
        try:
            async for answer in worker.answers():
                waiting = self._open.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except ValueError as error:  # longer than `_MAX_BYTES`, or not JSON
            problem = f"an answer could not be read ({error}): "
        if self._worker is worker:
            self._worker = None  # new episodes wait until this process has ended, and then start another
        ended = problem + await worker.end(exiting=not problem)
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(RuntimeError(ended))


class VerifiersWorker:
    """The worker process. Requests and answers are lines of JSON on a socket."""

    def __init__(
        self, process: DirectChild, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, output: str
    ) -> None:
        """`output` says where its output is."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._output = output

    @classmethod
    async def start(cls, options: VerifiersOptions, rows: int | None = None) -> VerifiersWorker:
        """Start the process and send it the settings.

        Args:
            options: The environment.
            rows: Write this many rows of a prompt file instead of running episodes; -1: all.

        Raises:
            RuntimeError: The Python that `options` names cannot be started.
        """
        python = options.python or sys.executable
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            # -P keeps this folder's files from shadowing modules. That Python need not have slime: it gets one file.
            argv = [python, "-P", str(_WORKER), child.__file__, str(descriptor)]
            try:
                process = DirectChild(argv, env=os.environ, log_path=None, pass_fds=[descriptor])
            except OSError as error:
                ours.close()
                raise RuntimeError(f"python = {python!r} of verifiers_env cannot be started: {error}") from error
        try:
            streams = await asyncio.open_unix_connection(sock=ours, limit=_MAX_BYTES)
        except BaseException:  # cancelled: nobody else could end the process
            process.close()
            raise
        worker = cls(process, *streams, output="in logs/rollout.log of the run" if rows is None else "above")
        settings = options.model_dump(mode="json", include={"taskset", "env", "path"})
        await worker.send({**settings, "rows": rows})
        return worker

    @property
    def pid(self) -> int:
        """Its process and group id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    async def send(self, request: dict[str, Any]) -> None:
        """Send a request. Raises `RuntimeError` if the process has ended."""
        try:
            if self._writer.is_closing():  # uvloop would raise another error
                raise ConnectionResetError
            self._writer.write(json.dumps(request).encode() + b"\n")
            await self._writer.drain()
        except ConnectionError:
            raise RuntimeError(await self.end(exiting=True)) from None

    async def answers(self) -> AsyncIterator[dict[str, Any]]:
        """Its answers, until it ends."""
        with contextlib.suppress(ConnectionError):
            while line := await self._reader.readline():
                yield json.loads(line)

    async def end(self, *, exiting: bool = False) -> str:
        """End it and all processes that it has started, by force if necessary; returns how it ended.

        Args:
            exiting: It has closed its socket, so it is given more time to end by itself.
        """
        self._writer.close()
        deadline = time.monotonic() + (_EXITING_S if exiting else _ENDING_S)
        while self.running and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self._process.close()
        await asyncio.to_thread(kill_group, self.pid)
        how = describe_exit(self._process.poll() or 0)
        return f"the process of the verifiers environment {how}; its output is {self._output}"
