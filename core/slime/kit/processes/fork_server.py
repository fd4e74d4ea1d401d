"""Processes that start in milliseconds: one process does the slow imports, the others are forked from it.

    server = ForkServer(slow_imports, log_path=...)
    server.start()
    child = ForkedChild(server.address, partial(work, "an argument"), log_path=...)

The server's function runs once; what it returns is given to every child's function. Functions and their arguments are
pickled, so they are looked up by name in the processes. Requests may be made from the moment `start` returns, and wait
until the imports are done. CPU only: a CUDA context does not survive a fork.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.kit.processes.child import DirectChild, kill_group, open_log

#: bytes of an answer of the fork server; requests travel in a file
ANSWER_SIZE = 4096


def pack(function: Callable[..., Any]) -> bytes:
    """Encode a function for another process, with the arguments that a `partial` binds and this process's import path.

    `unpack` decodes it there.
    """
    return pickle.dumps((list(sys.path), pickle.dumps(function)))


def unpack(content: bytes) -> Callable[..., Any]:
    """Decode a packed function. Sets the import path first, because unpickling it imports modules."""
    search_path, function = pickle.loads(content)
    sys.path[:] = search_path
    unpacked: Callable[..., Any] = pickle.loads(function)
    return unpacked


def in_memory_file(content: bytes) -> int:
    """A descriptor from which `content` can be read."""
    descriptor = os.memfd_create("slime-call")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


class ForkServer:
    """The process that others are forked from. It dies with the process that owns this object."""

    def __init__(
        self, prepare: Callable[[], Any], *, env: Mapping[str, str] | None = None, log_path: Path | None
    ) -> None:
        """Describe it; `start` starts it.

        Args:
            prepare: Called once, before any fork.
            env: Variables to set in addition to this process's own, before anything is imported.
            log_path: Where its output goes; None: this process's standard error.
        """
        self._prepare = prepare
        self._env = {**os.environ, **(env or {})}
        self._log_path = log_path
        self._child: DirectChild | None = None
        self._socket = -1

    @property
    def address(self) -> Path:
        """The socket for requests, for all processes of this user."""
        return Path(f"/proc/{os.getpid()}/fd/{self._socket}")

    @property
    def pid(self) -> int | None:
        """Its process and group id; None when it is not running."""
        return None if self._child is None else self._child.pid

    def poll(self) -> int | None:
        """None while it runs or was not started, else its exit status."""
        return None if self._child is None else self._child.poll()

    def start(self) -> None:
        """Start it; returns before the imports are done. Raises `OSError`."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        prepare = in_memory_file(pack(self._prepare))
        try:
            # The socket's file is reached through this process's descriptor, so that none is left behind.
            with tempfile.TemporaryDirectory(prefix="slime-fork-server-") as folder:
                listener.bind(f"{folder}/socket")
                listener.listen(128)
                self._socket = os.open(f"{folder}/socket", os.O_PATH | os.O_CLOEXEC)
            descriptors = [listener.fileno(), prepare]
            argv = [sys.executable, "-m", "slime.kit.processes.fork_server_main", *map(str, descriptors)]
            self._child = DirectChild(argv, env=self._env, log_path=self._log_path, pass_fds=descriptors)
        finally:
            os.close(prepare)
            listener.close()

    def stop(self) -> None:
        """End it, and with it every process it has forked."""
        child, self._child = self._child, None
        if child is None:
            return
        os.close(self._socket)
        child.close()
        kill_group(child.pid)
        child.poll()


class ForkedChild:
    """One process forked by the fork server at `address`."""

    def __init__(
        self, address: Path, function: Callable[..., Any], *, log_path: Path | None, pass_fds: Sequence[int] = ()
    ) -> None:
        """Request the process; returns before it has been forked.

        Args:
            address: `ForkServer.address`.
            function: What to run, after which the process ends. Called with the result of the server's function, or
                None where that is not known, and the numbers of `pass_fds`.
            log_path: Where its output goes; None: this process's standard error.
            pass_fds: Descriptors that it inherits.

        Raises:
            OSError: If the fork server does not run.
        """
        self._pid: int | None = None
        self._status: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = open_log(log_path)
        request = in_memory_file(pack(function))
        stdin, self._lifeline = os.pipe()
        try:
            self._connection.connect(str(address))
            socket.send_fds(self._connection, [b"fork"], [stdin, log, request, *pass_fds])
        except BaseException:
            self._connection.close()
            os.close(self._lifeline)
            raise
        finally:
            for descriptor in (stdin, log, request):
                os.close(descriptor)
        self._connection.setblocking(False)

    @property
    def pid(self) -> int | None:
        """Its process and group id; None until it has been forked."""
        if self._pid is None:
            self._read_answers()
        return self._pid

    def poll(self) -> int | None:
        """None while it runs or waits to be forked, then its exit status."""
        self._read_answers()
        return self._status

    def _read_answers(self) -> None:
        while self._status is None:
            try:
                message = self._connection.recv(ANSWER_SIZE)
            except BlockingIOError:
                return
            except ConnectionError:
                message = b""
            # An end without a status: the fork server itself was killed, and its children with it.
            answer = json.loads(message) if message else {"status": -signal.SIGKILL}
            self._pid = answer.get("pid", self._pid)
            self._status = answer.get("status")

    def close(self) -> None:
        """Close its lifeline."""
        if self._lifeline >= 0:
            self._read_answers()
            os.close(self._lifeline)
            self._lifeline = -1
            self._connection.close()
            self._status = -signal.SIGKILL if self._status is None else self._status
