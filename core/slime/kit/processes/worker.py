"""The program of a pool's worker: builds a handler, then answers calls until the pool closes the socket.

A handler that is a plain function is called once at a time; the pool keeps its deadlines, by killing the process.
Calls of a coroutine function overlap in one event loop; overdue ones are cancelled here, and the pool kills a worker
whose event loop stands still.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import logging
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, cast

from slime.errors import PluginError, SlimeError, one_line
from slime.kit.processes.fork_server import Call
from slime.kit.processes.frames import OVERLAP, FrameReader, Kind, Message, frame

#: makes a worker write the stacks of all threads to its log, and tell the pool which call it is in
TRACE_SIGNAL = signal.SIGUSR2
#: seconds between two checks of the deadlines of overlapping calls, at most
TICK_S = 0.1
#: seconds a cancelled call may take to end before its time-out is reported
GRACE_S = 1.0
_READ = 256 * 1024

#: the call that the running code belongs to; tasks inherit it from the task that created them
_CALL: ContextVar[int] = ContextVar("slime_worker_call", default=0)


def serve(prepared: Any, build: Call, timeout_s: float, descriptor: int) -> None:
    """Answer calls on the socket `descriptor`.

    Args:
        prepared: What the fork server's own call returned.
        build: What makes the handler, as `function(prepared, *arguments)`.
        timeout_s: Seconds one call may take.
        descriptor: A connected stream socket.
    """
    os.set_inheritable(descriptor, False)  # programs that the handler starts do not get it
    connection = socket.socket(fileno=descriptor)
    _free_standard_input()
    faulthandler.enable()
    _answer_trace_signal(connection)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        handler = build.run(prepared)
    except BaseException as error:  # the boundary around a plugin's construction, sys.exit() included
        logging.exception("the worker could not be built")
        connection.sendall(frame(Kind.NOT_READY, content=pickle.dumps(_known(error))))
        sys.exit(1)
    if inspect.iscoroutinefunction(handler):
        connection.sendall(frame(Kind.READY, content=OVERLAP))
        asyncio.run(_serve_overlapping(handler, timeout_s, connection))
    else:
        connection.sendall(frame(Kind.READY))
        _serve_one_by_one(handler, connection)


def _known(error: BaseException) -> SlimeError:
    """The error, converted to a class that the pool's process can unpickle."""
    if isinstance(error, SlimeError) and type(error).__module__ == SlimeError.__module__:
        return error
    return PluginError(f"a worker process could not be built: {one_line(error)}")


def _free_standard_input() -> None:
    """Keep programs that the handler starts from reading the lifeline to the parent."""
    os.dup(0)  # keeps the pipe, and what `end_with_parent` asked for
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _answer_trace_signal(connection: socket.socket) -> None:
    def tell(*_: object) -> None:
        connection.send(frame(Kind.INSIDE, _CALL.get()))

    # faulthandler writes even while C code keeps Python from running, and then lets Python run `tell`, if it can.
    signal.signal(TRACE_SIGNAL, tell)
    faulthandler.register(TRACE_SIGNAL, all_threads=True, chain=True)


def _serve_one_by_one(handler: Callable[[bytes], bytes], connection: socket.socket) -> None:
    reader = FrameReader()
    while data := connection.recv(_READ):
        for message in reader.feed(data):
            _CALL.set(message.call)
            started = time.monotonic()
            try:
                kind, content = Kind.ANSWER, handler(message.content)
            except BaseException as error:  # noqa: BLE001 - the boundary around the handler, sys.exit() included
                kind, content = Kind.RAISED, one_line(error).encode()
            # Immediately, because the pool assumes that the oldest call without an answer is running.
            connection.sendall(frame(kind, message.call, content, time.monotonic() - started))


async def _serve_overlapping(handler: Callable[[bytes], Any], timeout_s: float, connection: socket.socket) -> None:
    server = _OverlappingServer(handler, timeout_s)
    connection.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: server, sock=connection)
    await server.closed.wait()


@dataclass(eq=False, slots=True)
class _Running:
    """One call that is being answered."""

    task: asyncio.Task[None]
    #: `_OverlappingServer.clock` by which it must have ended
    deadline: float
    timed_out: bool = False


class _OverlappingServer(asyncio.Protocol):
    def __init__(self, handler: Callable[[bytes], Any], timeout_s: float) -> None:
        self.closed = asyncio.Event()
        self._handler = handler
        self._timeout_s = timeout_s
        self._tick_s = min(TICK_S, timeout_s / 5)
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._running: dict[int, _Running] = {}
        self._ticking = False
        #: seconds during which the event loop was free: time that other calls spend computing is not counted
        self._clock = 0.0
        self._ticked_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        self.closed.set()

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            if message.kind is Kind.CALL:
                context = copy_context()
                context.run(_CALL.set, message.call)
                task = self._loop.create_task(self._answer(message), context=context)
                self._running[message.call] = _Running(task, self._clock + self._timeout_s + self._tick_s)
            elif message.call in self._running:
                self._running[message.call].task.cancel()
        if self._running and not self._ticking:
            self._ticking, self._ticked_at = True, time.monotonic()
            self._loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        """Report that the event loop runs, and cancel overdue calls."""
        now = time.monotonic()
        self._clock += min(now - self._ticked_at, 2 * self._tick_s)
        self._ticked_at = now
        self._transport.write(frame(Kind.ALIVE))
        for call, running in list(self._running.items()):
            overdue_s = self._clock - running.deadline
            if overdue_s > 0 and not running.timed_out:
                running.timed_out = True
                running.task.cancel()
            elif overdue_s > GRACE_S:  # it does not end although it was cancelled
                self._finish(call, Kind.TIMED_OUT)
        self._ticking = bool(self._running)
        if self._ticking:
            self._loop.call_later(self._tick_s, self._tick)

    async def _answer(self, message: Message) -> None:
        started = time.monotonic()
        try:
            kind, content = Kind.ANSWER, await self._handler(message.content)
        except BaseException as error:  # noqa: BLE001 - the boundary around the handler, sys.exit() included
            running = self._running.get(message.call)
            kind, content = Kind.RAISED, one_line(error).encode()
            if running is not None and running.timed_out:
                kind, content = Kind.TIMED_OUT, b""
        self._finish(message.call, kind, content, time.monotonic() - started)

    def _finish(self, call: int, kind: Kind, content: bytes = b"", seconds: float = 0.0) -> None:
        if self._running.pop(call, None) is not None:
            self._transport.write(frame(kind, call, content, seconds))
