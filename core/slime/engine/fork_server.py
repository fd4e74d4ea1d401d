"""Engines in half a second: import SGLang once per host, then fork a whole server per request.

Importing SGLang takes 6 to 8 seconds of CPU; on a CPU host that is nearly all of an engine's start.  A
fork server imports it while the rest of a run starts, and every engine of the host shares that one
import (and its memory).  For CPU hosts only: a CUDA context does not survive a fork.

    host = ForkServer(log_path=...); host.start()
    EngineServer(EngineSpec(..., fork_server=host.address)).start()

The address is a Unix socket, usable from any process of the host from the moment `start` returns;
requests wait there until the import is done.  One message per server asked for: JSON `{"argv", "env"}`
with two file descriptors (standard input, log file); the answers are `{"pid"}` and, when the server
ends, `{"status"}`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.engine.children import DirectChild
from slime.engine.process import SupervisedProcess
from slime.errors import EngineError

MAX_MESSAGE = 64 * 1024


class ForkServer:
    """The fork server of one host, as a supervised child process of its owner.

    `env` is set before SGLang is imported: what SGLang reads at import time must be here.
    """

    def __init__(self, *, env: Mapping[str, str], log_path: Path) -> None:
        # Not in the run folder: the path of a Unix socket may have 107 characters at most.
        self._folder = tempfile.TemporaryDirectory(prefix="slime-fork-server-")
        self.address = Path(self._folder.name, "socket")
        self._env = dict(env)
        self.process = SupervisedProcess("the engine fork server", self._launch, log_path=log_path)

    def _launch(self) -> DirectChild:
        argv = [sys.executable, "-m", "slime.engine.fork_server_main", str(self.address)]
        return DirectChild(argv, env={**os.environ, **self._env}, log_path=self.process.log_path)

    def start(self, timeout_s: float = 30.0) -> None:
        """Start it and wait until its address exists (not for the import)."""
        self.process.start()
        self.process.wait_ready(self.address.exists, timeout_s)

    def stop(self) -> None:
        """End it, and with it every server it has forked."""
        self.process.stop()
        self._folder.cleanup()


class ForkedChild:
    """One server asked of the fork server at `address`."""

    def __init__(self, address: Path, argv: Sequence[str], *, env: Mapping[str, str], log_path: Path) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._pid: int | None = None
        self._status: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin, self._lifeline = os.pipe()
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._connection.connect(str(address))
            request = json.dumps({"argv": list(argv), "env": dict(env)}).encode()
            if len(request) > MAX_MESSAGE:
                raise EngineError(
                    f"the engine's arguments take {len(request)} bytes; at most {MAX_MESSAGE} can be sent"
                )
            socket.send_fds(self._connection, [request], [stdin, log])
        except BaseException:
            self._connection.close()
            os.close(self._lifeline)
            raise
        finally:
            os.close(stdin)
            os.close(log)
        self._connection.setblocking(False)

    @property
    def pid(self) -> int | None:
        """Its process and group id; None until it has been forked."""
        if self._pid is None and self._status is None:
            self._read_answers()
        return self._pid

    def poll(self) -> int | None:
        """None while it runs or waits to be forked, then its exit status."""
        if self._status is None:
            self._read_answers()
        return self._status

    def _read_answers(self) -> None:
        while self._status is None:
            try:
                message = self._connection.recv(MAX_MESSAGE)
            except BlockingIOError:
                return
            except ConnectionError:
                message = b""
            # An end without a status: the fork server itself was killed, and its servers with it.
            answer = json.loads(message) if message else {"status": -signal.SIGKILL}
            self._pid = answer.get("pid", self._pid)
            self._status = answer.get("status")

    def close(self) -> None:
        """Close the pipe that keeps it alive."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
            self._connection.close()
            self._status = -signal.SIGKILL if self._status is None else self._status
