"""The process behind `slime.engine.fork_server.ForkServer`: imports SGLang, then forks servers.

It must stay single-threaded: a forked process has only the thread that called fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
from typing import Any, NoReturn

from slime.engine.fork_server import MAX_MESSAGE
from slime.engine.launch import prepare_cpu_host, serve
from slime.engine.parent_watch import end_with_parent

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Entry point of `python -m slime.engine.fork_server_main ADDRESS`."""
    end_with_parent()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Bound under another name and renamed, so that the address exists only once it can be connected to.
    listener.bind(f"{sys.argv[1]}.new")
    listener.listen(128)
    os.rename(f"{sys.argv[1]}.new", sys.argv[1])
    prepare_cpu_host()
    print("SGLang is imported; waiting for requests", flush=True)
    _Forker(listener).run()


class _Forker:
    """Forks one server per connection and tells the connection how it ends."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._by_pid: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup, wakeup_end = os.pipe()
        os.set_blocking(wakeup_end, False)
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(wakeup_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only so that the wake-up pipe is written
        self._descriptors = [self._wakeup, wakeup_end]

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
                    self._answer(key.fileobj)

    def _answer(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        message, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE, 2)
        if not message:  # the asker left before it asked
            connection.close()
            return
        pid = os.fork()
        if pid == 0:
            self._become_server(json.loads(message), connection, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._by_pid[pid] = connection
        _tell(connection, pid=pid)

    def _collect(self) -> None:
        while self._by_pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self._by_pid.pop(pid)
            _tell(connection, status=os.waitstatus_to_exitcode(status))
            connection.close()

    def _become_server(self, request: dict[str, Any], connection: socket.socket, stdin: int, log: int) -> NoReturn:
        """In the new process: be what `python -m slime.engine.launch` would be by now."""
        status = 1
        try:
            os.setsid()
            # Should the fork server die, nobody would notice the server's end any more.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for other in (self._listener, connection, *self._by_pid.values()):
                other.close()
            for target, source in ((0, stdin), (1, log), (2, log)):
                os.dup2(source, target)
            for descriptor in (stdin, log, *self._descriptors):
                os.close(descriptor)
            end_with_parent()
            os.environ.update(request["env"])
            _apply_environment()
            serve(request["argv"])
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001  # the top of a process: report and leave, never return to the loop
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)


def _apply_environment() -> None:
    """Two variables were read before the fork; apply this server's own values."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    tempfile.tempdir = None


def _tell(connection: socket.socket, **answer: int) -> None:
    """Send an answer; the asker may have left."""
    with contextlib.suppress(OSError):
        connection.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
