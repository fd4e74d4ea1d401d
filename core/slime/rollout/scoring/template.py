"""The process that workers are forked from: `python -m slime.rollout.scoring.template CONTROL`.

Starting Python and importing a reward takes half a second of CPU or more; a rollout in which every fiftieth sample
hangs would spend more on replacing workers than on scoring.  This process imports everything once, builds nothing, and
forks a worker in some milliseconds.  A forked process has only the thread that called fork, so where an import has
started threads, the new process starts Python afresh instead.

Each request on the control socket brings four descriptors: standard input, log, socket and board of the new worker.
Answers are JSON: `{"pid"}` for each request in order, `{"pid", "status"}` when a worker ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import pickle
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from slime.engine.parent_watch import end_with_parent
from slime.plugins import PluginSet, load_plugins
from slime.rollout.scoring.job import Job
from slime.rollout.scoring.worker import serve

_PR_SET_PDEATHSIG = 1
#: bytes of a message: requests and answers are short
_MESSAGE = 4096


def main() -> None:
    """Import what the job needs and fork workers until killed."""
    end_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    plugins = _prepare(control)
    gc.freeze()  # collections in workers leave the shared pages alone
    _Forker(control, plugins).run()


def _prepare(control: socket.socket) -> PluginSet | None:
    """Read the job and import its reward.  What fails here fails in the worker again, which can tell."""
    _, [descriptor], _, _ = socket.recv_fds(control, _MESSAGE, 1)
    with open(descriptor, "rb") as file:
        search_path, packed_job = pickle.load(file)
    sys.path[:] = search_path  # before anything of a plugin is imported
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        job: Job = pickle.loads(packed_job)
        plugins = load_plugins(job.config.plugins)
        plugins.look_up(job.use).component.factory()
    except BaseException:  # the boundary around the import of the reward plugin, sys.exit() included
        logging.info("the reward could not be imported ahead", exc_info=True)
        return None
    return plugins


class _Forker:
    def __init__(self, control: socket.socket, plugins: PluginSet | None) -> None:
        self._control = control
        self._plugins = plugins
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_end = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(self._wakeup_end, False)
        signal.set_wakeup_fd(self._wakeup_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only so that the wake-up pipe is written

    def run(self) -> None:
        """Serve until the other end closes."""
        self._selector.register(self._control, selectors.EVENT_READ, self._fork)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._collect)
        while True:
            for key, _ in self._selector.select():
                act: Callable[[], None] = key.data
                act()

    def _fork(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE, 4)
        if not message:
            sys.exit(0)
        threads = len(os.listdir("/proc/self/task"))
        pid = os.fork()
        if pid == 0:
            self._become_worker(*descriptors, afresh=threads > 1)
        for descriptor in descriptors:
            os.close(descriptor)
        self._tell(pid=pid)

    def _collect(self) -> None:
        os.read(self._wakeup, _MESSAGE)
        with contextlib.suppress(ChildProcessError):  # none is left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._tell(pid=ended[0], status=os.waitstatus_to_exitcode(ended[1]))

    def _tell(self, **answer: int) -> None:
        with contextlib.suppress(OSError):  # the other end has gone, and this process is about to
            self._control.send(json.dumps(answer).encode())

    def _become_worker(self, stdin: int, log: int, connection: int, board: int, *, afresh: bool) -> NoReturn:
        """In the new process."""
        status = 1
        try:
            os.setsid()
            # Should this process's parent die, nobody would notice its end any more.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            self._control.close()
            for target, source in ((0, stdin), (1, log), (2, log)):
                os.dup2(source, target)
            for descriptor in (stdin, log, self._wakeup, self._wakeup_end):
                os.close(descriptor)
            if afresh:
                for descriptor in (connection, board):
                    os.set_inheritable(descriptor, True)
                argv = [sys.executable, "-m", "slime.rollout.scoring.worker", str(connection), str(board)]
                os.execv(sys.executable, argv)
            _new_chances()
            serve(connection, board, self._plugins)
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


def _new_chances() -> None:
    """Forked processes would all draw the same numbers; `random` has seen to itself."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


if __name__ == "__main__":
    main()
