"""The process behind `ForkServer`: `python -m slime.kit.processes.fork_server_main LISTENER PREPARE`.

A forked process has only the thread that called fork. If an import has started threads, a child is therefore a new
Python process: `python -m slime.kit.processes.fork_server_main --call REQUEST [DESCRIPTOR ...]`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from slime.errors.raised import LOG_FORMAT
from slime.kit.processes.child import end_with_parent
from slime.kit.processes.fork_server import unpack

#: descriptors of a request, at most
_DESCRIPTORS = 8
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """The command line."""
    end_with_parent()
    if sys.argv[1] == "--call":
        request, *descriptors = map(int, sys.argv[2:])
        unpack(_read(request))(None, *descriptors)
        return
    listener, prepare = map(int, sys.argv[1:])
    os.set_inheritable(listener, False)
    prepared = None
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    try:
        prepared = unpack(_read(prepare))()
    except BaseException:  # the imports fail again in the children, whose owners get the error
        logging.info("could not import ahead", exc_info=True)
    gc.freeze()  # collections in children leave the shared pages alone
    _Forker(socket.socket(fileno=listener), prepared).run()


def _read(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read()


class _Forker:
    """Forks one process per connection and reports its end on the connection."""

    def __init__(self, listener: socket.socket, prepared: Any) -> None:
        self._listener = listener
        self._prepared = prepared
        self._by_pid: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup, wakeup_end = os.pipe()
        os.set_blocking(wakeup_end, False)
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(wakeup_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler is needed for the wake-up pipe
        self._wakeup_pipe = [self._wakeup, wakeup_end]

    def run(self) -> NoReturn:
        """Serve until killed."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._selector.register(self._listener.accept()[0], selectors.EVENT_READ)
                elif key.fileobj == self._wakeup:
                    os.read(self._wakeup, 4096)
                    self._collect()
                elif isinstance(key.fileobj, socket.socket):
                    self._serve(key.fileobj)

    def _serve(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        message, descriptors, _, _ = socket.recv_fds(connection, 16, _DESCRIPTORS)
        if not message:  # the client left before it sent a request
            connection.close()
            return
        has_threads = len(os.listdir("/proc/self/task")) > 1
        pid = os.fork()
        if pid == 0:
            self._become_child(connection, descriptors, afresh=has_threads)
        for descriptor in descriptors:
            os.close(descriptor)
        self._by_pid[pid] = connection
        _report(connection, pid=pid)

    def _collect(self) -> None:
        while self._by_pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self._by_pid.pop(pid)
            _report(connection, status=os.waitstatus_to_exitcode(status))
            connection.close()

    def _become_child(self, connection: socket.socket, descriptors: Sequence[int], *, afresh: bool) -> NoReturn:
        """In the new process."""
        status = 1
        try:
            os.setsid()
            # Without the fork server nobody would notice the end of the child.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for other in (self._listener, connection, *self._by_pid.values()):
                other.close()
            stdin, log, request, *passed = descriptors
            for target, source in ((0, stdin), (1, log), (2, log)):
                os.dup2(source, target)
            for descriptor in (stdin, log, *self._wakeup_pipe):
                os.close(descriptor)
            if afresh:
                for descriptor in (request, *passed):
                    os.set_inheritable(descriptor, True)
                argv = [sys.executable, "-m", "slime.kit.processes.fork_server_main", "--call"]
                os.execv(sys.executable, [*argv, str(request), *map(str, passed)])
            end_with_parent()
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed()  # otherwise all children draw the same numbers; `random` reseeds itself
            unpack(_read(request))(self._prepared, *passed)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001  # the top of a process: report and leave, never return to the loop
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)


def _report(connection: socket.socket, **answer: int) -> None:
    """Send an answer; the client may have left."""
    with contextlib.suppress(OSError):
        connection.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
