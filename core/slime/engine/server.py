"""One SGLang server as a supervised child process."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from pathlib import Path

from slime.engine.arguments import EngineSpec, server_arguments, server_environment
from slime.engine.children import Child, DirectChild, living_members
from slime.engine.control import EngineControl
from slime.engine.fork_server import ForkedChild
from slime.engine.ports import free_port
from slime.engine.process import SupervisedProcess
from slime.errors import EngineError, SlimeError

__all__ = ["EngineServer", "EngineSpec"]

#: a GPU server is asked to leave by itself first, so that it gives its memory back in order; on a CPU
#: host there is nothing to give back
_CUDA_GRACE_S = 15.0


class EngineServer:
    """Starts, watches and ends the server that `spec` describes.  It dies with the process that owns this object."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.fork_server is not None and spec.device != "cpu":
            raise EngineError("a fork server is for CPU engines only: a CUDA context does not survive a fork")
        self.spec = spec
        self.port = spec.port or free_port(spec.host)
        self.url = f"http://{spec.host}:{self.port}"
        self.process = SupervisedProcess(f"the engine at {self.url}", self._launch, log_path=spec.log_path)
        self.control = EngineControl(self.url, tp_size=spec.tp_size)
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def _launch(self) -> Child:
        arguments = server_arguments(self.spec, self.port)
        environment = server_environment(self.spec)
        log_path = self.spec.log_path
        if self.spec.device == "cpu":
            # SGLang leaves its sockets behind when it ends.  Not on a GPU host, where the temporary folder
            # also holds compiled kernels worth keeping.
            self._scratch = tempfile.TemporaryDirectory(prefix="slime-engine-", ignore_cleanup_errors=True)
            environment = {"TMPDIR": self._scratch.name, **environment}
        if self.spec.fork_server is not None:
            return ForkedChild(self.spec.fork_server, arguments, env=environment, log_path=log_path)
        argv = [sys.executable, "-m", "slime.engine.launch", *arguments]
        return DirectChild(argv, env={**os.environ, **environment}, log_path=log_path)

    def start(self) -> None:
        """Start the server process; returns before it answers (see `wait_ready`)."""
        self.process.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the server answers requests.

        Raises `EngineError` when it ends first, `DeadlineError` after `timeout_s`; both show its last log lines.
        """
        self.process.wait_ready(self._answers, timeout_s)

    def _answers(self) -> bool:
        try:
            self.control.health(timeout_s=2.0)
        except SlimeError:
            return False
        return True

    def failure(self) -> str | None:
        """None while all is well; else how the server ended, with its last log lines."""
        return self.process.failure()

    def stop(self) -> None:
        """End the server and everything it started, and remove the files it leaves behind."""
        leftovers = _shared_memory_files(self.process.pid)
        self.process.stop(grace_s=_CUDA_GRACE_S if self.spec.device == "cuda" else 0.0)
        for path in leftovers:
            path.unlink(missing_ok=True)
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None


def _shared_memory_files(group: int | None) -> set[Path]:
    """The shared-memory files that SGLang has made for process group `group` (load reports, message
    queues); it never removes them."""
    found: set[Path] = set()
    for pid in living_members(group) if group is not None else ():
        with contextlib.suppress(OSError):
            found.update(
                map(Path, re.findall(r"/dev/shm/sgl(?:ang_loads|_shm)_\S+", Path(f"/proc/{pid}/maps").read_text()))
            )
    return found
