"""A worker process: forked from a template, or `python -m slime.rollout.scoring.worker SOCKET BOARD`."""

from __future__ import annotations

import faulthandler
import inspect
import logging
import os
import pickle
import signal
import socket
import sys

from slime.engine.parent_watch import end_with_parent
from slime.errors import PluginError, SlimeError
from slime.plugins import PluginSet
from slime.rollout.failures import describe
from slime.rollout.scoring.board import Board
from slime.rollout.scoring.frames import HEADER, frame
from slime.rollout.scoring.job import Job, Ready
from slime.rollout.scoring.serve_async import serve_async
from slime.rollout.scoring.serve_sync import serve_sync

#: makes a worker write where every thread is, even in a busy loop
TRACE_SIGNAL = signal.SIGUSR2


def main() -> None:
    """A worker that was started afresh."""
    serve(int(sys.argv[1]), int(sys.argv[2]), None)


def serve(socket_descriptor: int, board_descriptor: int, plugins: PluginSet | None) -> None:
    """Build the reward that the first message names and answer calls until the other end closes.

    The process leads its group, and its standard input is the pipe to its parent.
    """
    end_with_parent()
    _free_standard_input()
    faulthandler.enable()
    faulthandler.register(TRACE_SIGNAL, all_threads=True)
    for descriptor in (socket_descriptor, board_descriptor):
        os.set_inheritable(descriptor, False)  # what the reward starts gets neither
    connection, board = socket.socket(fileno=socket_descriptor), Board(board_descriptor)
    search_path, packed_job = pickle.loads(_first_message(connection))
    sys.path[:] = search_path  # before anything of a plugin is imported
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        job: Job = pickle.loads(packed_job)
        reward = job.build(plugins)
    except BaseException as error:  # the boundary around the reward plugin's construction, sys.exit() included
        logging.exception("the reward could not be built")
        connection.sendall(frame(0, pickle.dumps(_as_told(error))))
        sys.exit(1)
    overlaps = inspect.iscoroutinefunction(reward.score)
    connection.sendall(frame(0, pickle.dumps(Ready(overlaps))))
    if overlaps:
        serve_async(reward, job.title, job.timeout_s, connection, board)
    else:
        serve_sync(reward, job.title, connection, board)


def _free_standard_input() -> None:
    """Whatever the reward starts reads nothing from the pipe to the parent, and does not wait for it."""
    os.dup(0)  # keeps the pipe, and the watch over it
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _first_message(connection: socket.socket) -> bytes:
    """The content of the one message that comes before the reward is built."""
    length, _call = HEADER.unpack(_exactly(connection, HEADER.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            sys.exit(0)  # the parent went before it said anything
        data += piece
    return bytes(data)


def _as_told(error: BaseException) -> SlimeError:
    """The error as the run's process raises it: of a class that exists there."""
    if isinstance(error, SlimeError) and type(error).__module__ == SlimeError.__module__:
        return error
    return PluginError(f"a worker process could not build its reward: {describe(error)}")


if __name__ == "__main__":
    main()
