"""The program of a pool's worker: builds a handler, then answers calls until the pool closes the sockets.

A handler that is a plain function is called once at a time; the pool keeps its deadlines, by killing the process.
Calls of a coroutine function overlap in one event loop; overdue ones are cancelled here, and the pool kills a worker
whose event loop stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import logging
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from slime.errors import PluginError, SlimeError
from slime.errors.raised import LOG_FORMAT, Raised
from slime.kit.processes.frames import OVERLAP, Message, MessageKind, read_message, receive_message
from slime.kit.processes.pulse import STACK_SIGNAL

#: seconds between two checks of the deadlines of overlapping calls, at most
TICK_S = 0.1
#: seconds a cancelled call may take to end before its time-out is reported
GRACE_S = 1.0

#: the call that the running code belongs to; tasks inherit it from the task that created them
_CALL: ContextVar[int] = ContextVar("slime_worker_call", default=0)


def serve(
    build: Callable[[Any], Callable[[bytes], Any]], timeout_s: float, prepared: Any, calls_fd: int, answers_fd: int
) -> None:
    """Answer calls until no more can arrive.

    Args:
        build: What makes the handler from `prepared`.
        timeout_s: Seconds one call may take.
        prepared: What the fork server's own function returned.
        calls_fd: A connected stream socket to read calls from.
        answers_fd: Another, to write answers to.
    """
    for fd in (calls_fd, answers_fd):
        os.set_inheritable(fd, False)  # programs that the handler starts do not get it
    calls, answers = socket.socket(fileno=calls_fd), socket.socket(fileno=answers_fd)
    faulthandler.enable()
    _answer_stack_signal(answers)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    with contextlib.suppress(ConnectionError):  # the pool closes the sockets whenever it no longer needs the worker
        try:
            handler = build(prepared)
        except BaseException as error:  # the boundary around a plugin's construction, sys.exit() included
            logging.exception("the worker could not be built")
            answers.sendall(Message(MessageKind.NOT_READY, content=pickle.dumps(_known(error))).pack())
            sys.exit(1)
        if inspect.iscoroutinefunction(handler):
            answers.sendall(Message(MessageKind.READY, content=OVERLAP).pack())
            asyncio.run(_OverlappingCalls(handler, timeout_s).serve(calls, answers))
        else:
            answers.sendall(Message(MessageKind.READY).pack())
            _serve_one_by_one(handler, calls, answers)


def _known(error: BaseException) -> SlimeError:
    """The error, converted to a class that the pool's process can unpickle."""
    if isinstance(error, SlimeError) and type(error).__module__ == SlimeError.__module__:
        return error
    return PluginError(f"a worker process could not be built: {Raised.of(error)}")


def _answer_stack_signal(answers: socket.socket) -> None:
    """On `STACK_SIGNAL`, also report which call the worker is in."""

    def report(*_: object) -> None:
        answers.send(Message(MessageKind.INSIDE, _CALL.get()).pack())

    # faulthandler writes even while C code keeps Python from running, and then lets Python run `report`, if it can.
    signal.signal(STACK_SIGNAL, report)
    faulthandler.register(STACK_SIGNAL, all_threads=True, chain=True)


def _serve_one_by_one(handler: Callable[[bytes], bytes], calls: socket.socket, answers: socket.socket) -> None:
    stream = calls.makefile("rb")
    while (message := read_message(stream)) is not None:
        _CALL.set(message.call)
        started = time.monotonic()
        try:
            kind, content = MessageKind.ANSWER, handler(message.content)
        except BaseException as error:  # noqa: BLE001 - the boundary around the handler, sys.exit() included
            kind, content = MessageKind.RAISED, pickle.dumps(Raised.of(error))
        # Immediately, because the pool assumes that the oldest call without an answer is running.
        answers.sendall(Message(kind, message.call, content, time.monotonic() - started).pack())


@dataclass(eq=False, slots=True)
class _Running:
    """One call that is being answered."""

    task: asyncio.Task[None]
    #: seconds until its deadline, which pass only while the event loop is free for it; negative: it was cancelled
    left_s: float


class _OverlappingCalls:
    """Answers calls concurrently in one event loop."""

    def __init__(self, handler: Callable[[bytes], Awaitable[bytes]], timeout_s: float) -> None:
        self._handler = handler
        self._timeout_s = timeout_s
        self._tick_s = min(TICK_S, timeout_s / 5)
        self._running: dict[int, _Running] = {}

    async def serve(self, calls: socket.socket, answers: socket.socket) -> None:
        """Answer until the pool closes `calls`."""
        reader, unused_writer = await asyncio.open_unix_connection(sock=calls)
        _, self._writer = await asyncio.open_unix_connection(sock=answers)
        ticking = asyncio.create_task(self._tick())
        while (message := await receive_message(reader)) is not None:
            if message.kind is MessageKind.CALL:
                task = asyncio.create_task(self._answer(message))
                self._running[message.call] = _Running(task, self._timeout_s + self._tick_s)
            elif (running := self._running.pop(message.call, None)) is not None:
                running.task.cancel()
        ticking.cancel()
        unused_writer.close()

    async def _tick(self) -> None:
        """Report that the event loop runs, and cancel overdue calls, again and again."""
        while True:
            started = time.monotonic()
            await asyncio.sleep(self._tick_s)
            # A longer tick means that other calls were computing, which is not counted.
            passed_s = min(time.monotonic() - started, 2 * self._tick_s)
            if self._running:
                self._writer.write(Message(MessageKind.ALIVE).pack())
            for call, running in list(self._running.items()):
                was_in_time = running.left_s >= 0
                running.left_s -= passed_s
                if running.left_s < -GRACE_S:  # it does not end although it was cancelled
                    self._finish(Message(MessageKind.TIMED_OUT, call))
                elif running.left_s < 0 and was_in_time:
                    running.task.cancel()

    async def _answer(self, message: Message) -> None:
        _CALL.set(message.call)
        started = time.monotonic()
        try:
            kind, content = MessageKind.ANSWER, await self._handler(message.content)
        except BaseException as error:  # noqa: BLE001 - the boundary around the handler, sys.exit() included
            running = self._running.get(message.call)
            timed_out = running is not None and running.left_s < 0
            kind, content = (
                (MessageKind.TIMED_OUT, b"") if timed_out else (MessageKind.RAISED, pickle.dumps(Raised.of(error)))
            )
        self._finish(Message(kind, message.call, content, time.monotonic() - started))

    def _finish(self, answer: Message) -> None:
        if self._running.pop(answer.call, None) is not None:
            self._writer.write(answer.pack())
