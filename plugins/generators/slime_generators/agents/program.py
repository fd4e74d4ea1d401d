"""An agent that is a program of its own, in whatever language."""

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

#: bytes of its output that are looked at: the last ones
_OUTPUT = 2**20
#: characters of its error output in a message
_EXCERPT = 300


class ProgramAgent:
    """A command, started once for each sample in a process group of its own, which is killed at the end.

    - `OPENAI_BASE_URL` and `OPENAI_API_KEY` are in its environment, where OpenAI's clients look for them.
    - `{prompt}` in the command is replaced by the prompt's text; standard input is the task as a line of JSON.
    - What it prints is the answer; a JSON object with `answer`, `reward`, `metadata` or `metrics` is all of those.
    """

    def __init__(self, command: str) -> None:
        """Raises `ValueError` for a command that cannot be read, or whose program is not there."""
        self._words = shlex.split(command)
        if not self._words or shutil.which(self._words[0]) is None:
            raise ValueError(f"agent command {command!r}: there is no program {self._words[:1]}")

    async def __call__(self, task: AgentTask) -> object:
        """What it printed.  Raises `RuntimeError` for an exit code other than 0; cancelling it kills it."""
        text = "\n".join(str(message["content"]) for message in task.messages if message["role"] == "user")
        # Files, because a pipe is open for as long as anything that the program left running holds it.
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
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.shield(process.wait())
            if code != 0:
                said = _end_of(errors, 4 * _EXCERPT).strip()[-_EXCERPT:]
                raise RuntimeError(f"the agent's program ended with exit code {code}: {said}")
            return _result(_end_of(output, _OUTPUT))


def _end_of(file: BinaryIO, most: int) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - most))
    return file.read(most).decode(errors="replace")


def _result(output: str) -> object:
    text = output.strip()
    if text.startswith("{"):
        with contextlib.suppress(ValueError):
            row = json.loads(text)
            if row.keys() <= {"answer", "reward", "metadata", "metrics"}:
                return row
    return text
