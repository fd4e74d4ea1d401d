"""An agent that is a program, in any language."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import tempfile
from dataclasses import asdict
from typing import BinaryIO

from slime_generators.agents.task import AgentTask

#: bytes at the end of its output that are read
_OUTPUT = 2**20
#: characters of its error output in a message
_EXCERPT = 300


class ProgramAgent:
    """A command that runs once for each sample, in its own process group, which is killed at the end.

    - Its environment has `OPENAI_BASE_URL` and `OPENAI_API_KEY`, which OpenAI's clients read.
    - `{prompt}` in the command is replaced by the prompt's text. Standard input is the task as a line of JSON.
    - Its output is the answer, or a JSON object with some of `answer`, `reward`, `metadata` and `metrics`.
    """

    def __init__(self, command: str) -> None:
        """Initialize.

        Raises:
            ValueError: The command cannot be parsed, or its program does not exist.
        """
        self._words = shlex.split(command)
        if not self._words or shutil.which(self._words[0]) is None:
            raise ValueError(f"agent command {command!r}: there is no program {self._words[:1]}")

    async def __call__(self, task: AgentTask) -> object:
        """The program's output. Raises `RuntimeError` for an exit code other than 0; cancellation kills it."""
        text = "\n".join(str(message["content"]) for message in task.messages if message["role"] == "user")
        # Files, because a pipe stays open as long as any process that the program left running holds it.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                *(word.replace("{prompt}", text) for word in self._words),
                env={**os.environ, "OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key},
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            assert process.stdin is not None
            try:
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(json.dumps(asdict(task)).encode() + b"\n")
                    await process.stdin.drain()
                process.stdin.close()
                code = await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and everything that it started
                await asyncio.shield(process.wait())
            if code != 0:
                excerpt = _end_of(errors, 4 * _EXCERPT).strip()[-_EXCERPT:]
                raise RuntimeError(f"the agent's program ended with exit code {code}: {excerpt}")
            return _result(_end_of(output, _OUTPUT))


def _end_of(file: BinaryIO, size: int) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - size))
    return file.read(size).decode(errors="replace")


def _result(output: str) -> object:
    text = output.strip()
    if text.startswith("{"):
        with contextlib.suppress(ValueError):
            row = json.loads(text)
            if row.keys() <= {"answer", "reward", "metadata", "metrics"}:
                return row
    return text
