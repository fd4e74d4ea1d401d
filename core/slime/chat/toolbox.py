"""Runs tools for a model: whatever the tool or the call does, there is a text to answer with, in time."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import json
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from slime.chat.tool_calls import ToolCall
from slime.chat.tools import Tool
from slime.errors import did_you_mean

#: "ok"; "error": the tool raised; "timeout": it took too long; "invalid": arguments that do not fit its signature;
#: "unknown": no such tool; "malformed": the call cannot be read
Kind: TypeAlias = Literal["ok", "error", "timeout", "invalid", "unknown", "malformed"]

#: kind, text, and whether the text was cut
_Answer: TypeAlias = tuple[Kind, str, bool]

#: calls of one tool that may hang before it is not called any more
_HUNG = 64
#: calls of one answer that run at the same time: a model may write hundreds
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What became of one call."""

    #: what the model is told
    text: str
    kind: Kind = "ok"
    #: the tool that was called; empty where there is none of that name
    tool: str = ""
    seconds: float = 0.0
    #: whether the text was longer than it may be
    cut: bool = False


class Toolbox:
    """Calls tools, each call behind a boundary.

    - Plain functions run in a thread of their own, `async def` ones are awaited in the event loop.
    - A call that takes longer than `timeout_s` is given up.  A coroutine is cancelled; a thread cannot be ended and is
      left behind.  While 64 calls of one tool hang, it is not called any more: every further call is a timeout at once.
    - Results of more than `max_chars` characters are cut, and end with a note that says so.
    - A text is taken as it is, bytes as UTF-8 (what is none becomes U+FFFD), None as no output, anything else as JSON
      or, where JSON cannot carry it, as `str` gives it.
    """

    def __init__(self, tools: Sequence[Tool], *, timeout_s: float = 30.0, max_chars: int = 4096) -> None:
        """Raises `ValueError` for two tools of one name."""
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) != len(tools):
            raise ValueError(f"two tools of one name among {', '.join(tool.name for tool in tools)}")
        self._timeout_s = timeout_s
        self._max_chars = max_chars
        self._hung = dict.fromkeys(self.tools, 0)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools' JSON schemas."""
        return [tool.schema for tool in self.tools.values()]

    async def run_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """The results of the calls of one turn, in order; up to 16 calls run at the same time."""
        if len(calls) == 1:
            return [await self.run(calls[0])]
        free = asyncio.Semaphore(_AT_ONCE)

        async def run(call: ToolCall) -> ToolResult:
            async with free:
                return await self.run(call)

        return list(await asyncio.gather(*map(run, calls)))

    async def run(self, call: ToolCall) -> ToolResult:
        """The result of one call.  Raises nothing but cancellation."""
        tool = self.tools.get(call.name)
        if tool is None and call.name:
            known = f"known: {', '.join(self.tools)}" if self.tools else "there are none"
            return self._told(
                "unknown", "", f"no tool is called {call.name!r}; {known}.{did_you_mean(call.name, self.tools)}"
            )
        if call.problem or tool is None:
            return self._told("malformed", "" if tool is None else tool.name, call.problem or "a call without a name")
        try:
            arguments = tool.check(call.arguments)
        except ValueError as error:
            return self._told("invalid", tool.name, str(error))
        if self._hung[tool.name] >= _HUNG:
            return self._told("timeout", tool.name, f"{tool.name} does not answer")
        return await self._timed(tool, arguments)

    async def _timed(self, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        started = time.perf_counter()
        answer = self._start(tool, arguments)
        try:
            # Not `asyncio.timeout`, which would wait for a tool that ignores its cancellation.
            await asyncio.wait({answer}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            self._abandon(tool, answer)
            raise
        seconds = time.perf_counter() - started
        if not answer.done():
            self._abandon(tool, answer)
            text = f"error: {tool.name} did not answer within {self._timeout_s:g} s"
            return ToolResult(text, "timeout", tool.name, seconds)
        if answer.cancelled():
            return ToolResult(f"error: {tool.name} cancelled itself", "error", tool.name, seconds)
        kind, text, cut = answer.result()
        return ToolResult(text, kind, tool.name, seconds, cut)

    def _start(self, tool: Tool, arguments: dict[str, Any]) -> asyncio.Future[_Answer]:
        """The answer to come; it is never an exception."""
        loop = asyncio.get_running_loop()
        if inspect.iscoroutinefunction(tool.function):
            return loop.create_task(_awaited(tool.function(**arguments), self._max_chars))
        answer: asyncio.Future[_Answer] = loop.create_future()
        context = contextvars.copy_context()

        def run() -> None:
            said = context.run(_called, tool.function, arguments, self._max_chars)
            with contextlib.suppress(RuntimeError):  # the loop may have ended long ago
                loop.call_soon_threadsafe(answer.set_result, said)

        # A thread of its own, because a pool would fill up with what hangs; it does not keep the process alive.
        threading.Thread(target=run, name=f"tool-{tool.name}", daemon=True).start()
        return answer

    def _abandon(self, tool: Tool, answer: asyncio.Future[_Answer]) -> None:
        """Go on without an answer: it counts as hanging until it comes."""

        def came(_: asyncio.Future[_Answer]) -> None:
            self._hung[tool.name] -= 1

        self._hung[tool.name] += 1
        answer.add_done_callback(came)
        if isinstance(answer, asyncio.Task):
            answer.cancel()

    def _told(self, kind: Kind, tool: str, text: str) -> ToolResult:
        text, cut = _clean(f"error: {text}", self._max_chars)
        return ToolResult(text, kind, tool, 0.0, cut)


def _called(function: Callable[..., Any], arguments: dict[str, Any], limit: int) -> _Answer:
    try:
        return "ok", *_as_text(function(**arguments), limit)
    except BaseException as error:  # noqa: BLE001 - the boundary around the tool, SystemExit included
        return _failed(error, limit)


async def _awaited(work: Awaitable[Any], limit: int) -> _Answer:
    try:
        return "ok", *_as_text(await work, limit)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - the boundary around the tool; SystemExit would end the event loop
        return _failed(error, limit)


def _failed(error: BaseException, limit: int) -> _Answer:
    return "error", *_clean(f"error: {type(error).__name__}: {_said(error)}", limit)


def _as_text(value: Any, limit: int) -> tuple[str, bool]:
    """A tool's result as text of at most `limit` characters and the note, and whether it was cut."""
    if value is None:
        return "", False
    if isinstance(value, bytes | bytearray | memoryview):
        # Not all of ten megabytes: no character is more than four bytes.
        data = memoryview(value).cast("B")
        text = bytes(data[: 4 * limit + 4]).decode("utf-8", "replace")
        return _clean(text, limit, f"{len(data)} bytes" if len(data) > 4 * limit + 4 else None)
    elif not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            value = str(value)
    return _clean(value, limit)


def _clean(text: str, limit: int, whole: str | None = None) -> tuple[str, bool]:
    """Text that a tokenizer takes (no lone surrogates), cut at `limit` with a note of how long the `whole` is."""
    cut = len(text) > limit
    if cut:
        text = f"{text[:limit]}\n[cut: {whole or f'{len(text)} characters'}, the first {limit} are shown]"
    return text.encode("utf-8", "replace").decode("utf-8"), cut


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception of the tool's own that cannot even be printed
        return "(no message)"
