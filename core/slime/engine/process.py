"""A supervised child process: started with a log file, watched, waited for with a deadline, stopped for good."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from slime.errors import DeadlineError, EngineError
from slime.kit.processes import Child, DirectChild, describe_exit, in_memory_file, kill_group
from slime.observe.log import log_excerpt, log_tail

_POLL_S = 0.05
#: what SGLang logs before it ends an engine that has lost a process: role, pid, exit status
_LOST = re.compile(r"Subprocess (scheduler|detokenizer)\w* \(pid=(\d+)\) crashed with exit code (-?\d+)")
#: it logs little after that
_LAST_LINES = 20


def launch_child(
    role: Literal["engine", "router"],
    arguments: Sequence[str],
    *,
    secret: Any,
    env: Mapping[str, str],
    log_path: Path,
) -> Child:
    """Start `slime.engine.launch`.

    Args:
        role: What it becomes.
        arguments: Words of its command line, which every user of the machine can read.
        secret: A JSON value that only this user's processes can read: it travels in an in-memory file.
        env: Its environment.
        log_path: Where its output goes.
    """
    descriptor = in_memory_file(json.dumps(secret).encode())
    try:
        argv = [sys.executable, "-m", "slime.engine.launch", role, str(descriptor), *arguments]
        return DirectChild(argv, env=env, log_path=log_path, pass_fds=[descriptor])
    finally:
        os.close(descriptor)


class SupervisedProcess(ABC):
    """A child process that dies with the process that owns this object."""

    def __init__(self, name: str, log_path: Path) -> None:
        """Describe the process; `start` starts it.

        Args:
            name: What messages call it.
            log_path: Where its output goes.
        """
        self.name = name
        self.log_path = log_path
        self._child: Child | None = None
        self._started_at = 0.0
        self._ended_at: float | None = None

    @abstractmethod
    def launch(self) -> Child:
        """Start the process, with its output in `log_path`. Raises `OSError`."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the running process can be used."""

    @property
    def pid(self) -> int | None:
        """Process and group id; None before the process exists and after `stop`."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the process; returns before it is ready.

        Raises:
            EngineError: If it already runs or cannot be started.
        """
        if self._child is not None:
            raise EngineError(f"{self.name} was started twice; stop it first")
        self._started_at, self._ended_at = time.monotonic(), None
        try:
            self._child = self.launch()
        except OSError as error:
            raise EngineError(f"{self.name} could not be started: {error}") from error

    def poll(self) -> int | None:
        """None while the process runs, then its exit status (negative: minus the signal).

        The first call after its end also kills the processes it left behind.

        Raises:
            EngineError: If it was never started, or was stopped.
        """
        if self._child is None:
            raise EngineError(f"{self.name} is not running: it was not started, or it was stopped")
        status = self._child.poll()
        if status is not None and self._ended_at is None:
            self._ended_at = time.monotonic()
            if self._child.pid is not None:
                kill_group(self._child.pid)
        return status

    def failure(self) -> str | None:
        """How the process ended, with its last log lines; None while it runs, before `start` and after `stop`."""
        if self._child is None or (status := self.poll()) is None:
            return None
        how = describe_exit(status)
        if status == -signal.SIGKILL:
            how += self._why_killed()
        assert self._ended_at is not None
        seconds = self._ended_at - self._started_at
        return f"{self.name} (pid {self._child.pid}) {how} after {seconds:.0f} s. {log_excerpt(self.log_path)}"

    def _why_killed(self) -> str:
        if lost := _LOST.findall("\n".join(log_tail(self.log_path)[-_LAST_LINES:])):
            role, pid, status = lost[0]
            return f" by SGLang, because its {role} (pid {pid}) {describe_exit(int(status))},"
        return " (by a person, by the kernel for lack of memory, or by its own processes after an error)"

    def wait_ready(self, timeout_s: float, watch: Callable[[], None] | None = None) -> None:
        """Return once the process is ready. `watch` is called meanwhile, and may raise.

        Raises:
            EngineError: If it ends first, with its last log lines.
            DeadlineError: After `timeout_s`, with its last log lines.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if (failure := self.failure()) is not None:
                raise EngineError(failure)
            if self._child is not None and self.is_ready():
                return
            if time.monotonic() > deadline:
                raise DeadlineError(f"{self.name} was not ready after {timeout_s:.0f} s. {log_excerpt(self.log_path)}")
            if watch is not None:
                watch()
            time.sleep(_POLL_S)

    def stop(self, grace_s: float = 0.0) -> None:
        """End the process and everything it started; harmless when it has ended or was never started.

        Args:
            grace_s: Seconds between SIGTERM and SIGKILL; 0: SIGKILL at once.

        Raises:
            EngineError: If something survives SIGKILL (a process stuck in the kernel).
        """
        child, self._child = self._child, None
        if child is None:
            return
        pid = child.pid
        if pid is not None and grace_s > 0 and child.poll() is None:
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        child.close()
        if pid is None:
            return
        if survivors := kill_group(pid):
            raise EngineError(f"{self.name}: processes {survivors} did not end on SIGKILL. See {self.log_path}.")
        child.poll()  # collect the exit status, so that no zombie is left
