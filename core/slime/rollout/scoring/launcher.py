"""Starts the workers of one reward, by way of the process they are forked from."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from slime.engine.children import DirectChild, kill_group
from slime.rollout.scoring.job import Job

#: bytes of a message
_MESSAGE = 4096


class ForkedWorker:
    """A worker as `slime.engine.children.Child`: a process that dies when `close` is called or this one ends."""

    def __init__(self, lifeline: int) -> None:
        """`lifeline`: the writing end of its standard input."""
        self.pid: int | None = None
        self.status: int | None = None
        self._lifeline = lifeline

    def poll(self) -> int | None:
        """None while it runs or waits to be forked, then its exit status."""
        return self.status

    def close(self) -> None:
        """Close the pipe that keeps it alive."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


class Launcher:
    """The process that workers are forked from, started when the first is wanted and again should it die."""

    def __init__(self, job: Job, log_path: Path) -> None:
        #: the first message to every worker: everything it needs before it imports anything of a plugin
        self.message = pickle.dumps((sys.path, pickle.dumps(job)))
        self._log_path = log_path
        self._template: DirectChild | None = None
        self._control: socket.socket | None = None
        self._asked: deque[ForkedWorker] = deque()
        self._workers: dict[int, ForkedWorker] = {}

    def launch(self, descriptors: Sequence[int], log_path: Path) -> ForkedWorker:
        """A new worker that inherits `descriptors` (socket, board).  Raises `OSError`."""
        control = self._control or self._start()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        stdin, lifeline = os.pipe()
        worker = ForkedWorker(lifeline)
        log = -1
        try:
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            socket.send_fds(control, [b"fork"], [stdin, log, *descriptors])
        except OSError:
            worker.close()
            raise
        finally:
            os.close(stdin)
            if log >= 0:
                os.close(log)
        self._asked.append(worker)
        return worker

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, "-m", "slime.rollout.scoring.template", str(theirs.fileno())]
            self._template = DirectChild(argv, env=os.environ, log_path=self._log_path, pass_fds=(theirs.fileno(),))
        # The message may be larger than one of the socket's, so it goes by way of a file.
        descriptor = os.memfd_create("slime-reward-job")
        with open(descriptor, "w+b") as file:
            file.write(self.message)
            file.flush()
            file.seek(0)
            socket.send_fds(ours, [b"job"], [descriptor])
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._read)
        self._control = ours
        return ours

    def _read(self) -> None:
        """Take the template's answers."""
        assert self._control is not None
        while True:
            try:
                message = self._control.recv(_MESSAGE)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self.stop()
                return
            answer = json.loads(message)
            pid = answer["pid"]
            if "status" in answer:
                self._workers.pop(pid).status = answer["status"]
            else:
                worker = self._workers[pid] = self._asked.popleft()
                worker.pid = pid

    def stop(self) -> None:
        """End the template, which ends every worker that is left."""
        if self._control is None or self._template is None:
            return
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._control = None
        self._template.close()
        kill_group(self._template.pid)
        self._template.poll()
        for worker in [*self._asked, *self._workers.values()]:
            worker.status = -signal.SIGKILL
        self._asked.clear()
        self._workers.clear()
