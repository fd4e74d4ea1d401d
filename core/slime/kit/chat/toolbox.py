"""Running tools for a model: every call gives a text in time, whatever the tool does."""

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

from slime.errors import did_you_mean
from slime.kit.chat.tool_calls import ToolCall
from slime.kit.chat.tools import Tool

#: "ok"; "error": the tool raised; "timeout": it took too long; "invalid": the arguments do not fit its signature;
#: "unknown": no such tool; "malformed": the call cannot be read
Kind: TypeAlias = Literal["ok", "error", "timeout", "invalid", "unknown", "malformed"]

#: kind, text, and whether the text was cut
_Output: TypeAlias = tuple[Kind, str, bool]

#: hanging calls after which a tool is not called any more
_HUNG = 64
#: concurrent calls of one answer: a model may write hundreds
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The outcome of one call."""

    #: the text for the model
    text: str
    kind: Kind = "ok"
    #: the tool that was called; empty if there is none of that name
    tool: str = ""
    seconds: float = 0.0
    #: whether the text was cut because it was too long
    cut: bool = False


class Toolbox:
    """Calls tools, with limits on time and output.

    - Each plain function runs in its own thread; `async def` functions are awaited in the event loop.
    - A call that takes longer than `timeout_s` is abandoned. A coroutine is cancelled; a thread cannot be ended and is
      left behind. While 64 calls of one tool hang, further calls of it time out at once.
    - Results of more than `max_chars` characters are cut and end with a note.
    - A string is returned unchanged, bytes as UTF-8 (invalid bytes become U+FFFD), None as no output, and anything else
      as JSON or, if JSON cannot express it, as `str`.
    """

    def __init__(self, tools: Sequence[Tool], *, timeout_s: float = 30.0, max_chars: int = 4096) -> None:
        """Raises `ValueError` if two tools have the same name."""
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) != len(tools):
            raise ValueError(f"two tools have the same name: {', '.join(tool.name for tool in tools)}")
        self._timeout_s = timeout_s
        self._max_chars = max_chars
        self._hung = dict.fromkeys(self.tools, 0)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools' JSON schemas."""
        return [tool.schema for tool in self.tools.values()]

    async def run_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """The results of the calls of one turn, in order; up to 16 calls run at once."""
        if len(calls) == 1:
            return [await self.run(calls[0])]
        free = asyncio.Semaphore(_AT_ONCE)

        async def run(call: ToolCall) -> ToolResult:
            async with free:
                return await self.run(call)

        return list(await asyncio.gather(*map(run, calls)))

    async def run(self, call: ToolCall) -> ToolResult:
        """The result of one call. Raises only `CancelledError`."""
        tool = self.tools.get(call.name)
        if tool is None and call.name:
            known = f"known: {', '.join(self.tools)}" if self.tools else "there are none"
            return self._refused(
                "unknown", "", f"no tool is called {call.name!r}; {known}.{did_you_mean(call.name, self.tools)}"
            )
        if call.problem or tool is None:
            return self._refused(
                "malformed", "" if tool is None else tool.name, call.problem or "a call without a name"
            )
        try:
            arguments = tool.check(call.arguments)
        except ValueError as error:
            return self._refused("invalid", tool.name, str(error))
        if self._hung[tool.name] >= _HUNG:
            return self._refused("timeout", tool.name, f"{tool.name} does not answer")
        return await self._timed(tool, arguments)

    async def _timed(self, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        started = time.perf_counter()
        pending = self._start(tool, arguments)
        try:
            # Not `asyncio.timeout`, which would wait for a tool that ignores its cancellation.
            await asyncio.wait({pending}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            self._abandon(tool, pending)
            raise
        seconds = time.perf_counter() - started
        if not pending.done():
            self._abandon(tool, pending)
            text = f"error: {tool.name} did not answer within {self._timeout_s:g} s"
            return ToolResult(text, "timeout", tool.name, seconds)
        if pending.cancelled():
            return ToolResult(f"error: {tool.name} cancelled itself", "error", tool.name, seconds)
        kind, text, cut = pending.result()
        return ToolResult(text, kind, tool.name, seconds, cut)

    def _start(self, tool: Tool, arguments: dict[str, Any]) -> asyncio.Future[_Output]:
        """Start a call; its result is never an exception."""
        loop = asyncio.get_running_loop()
        if inspect.iscoroutinefunction(tool.function):
            return loop.create_task(_awaited(tool.function(**arguments), self._max_chars))
        pending: asyncio.Future[_Output] = loop.create_future()
        context = contextvars.copy_context()

        def run() -> None:
            output = context.run(_called, tool.function, arguments, self._max_chars)
            with contextlib.suppress(RuntimeError):  # the loop may have ended
                loop.call_soon_threadsafe(pending.set_result, output)

        # Not a pool, which hanging calls would fill up. A daemon, so that it does not keep the process alive.
        threading.Thread(target=run, name=f"tool-{tool.name}", daemon=True).start()
        return pending

    def _abandon(self, tool: Tool, pending: asyncio.Future[_Output]) -> None:
        """Stop waiting for a call; it counts as hanging until it ends."""

        def ended(_: asyncio.Future[_Output]) -> None:
            self._hung[tool.name] -= 1

        self._hung[tool.name] += 1
        pending.add_done_callback(ended)
        if isinstance(pending, asyncio.Task):
            pending.cancel()

    def _refused(self, kind: Kind, tool: str, text: str) -> ToolResult:
        text, cut = _clean(f"error: {text}", self._max_chars)
        return ToolResult(text, kind, tool, 0.0, cut)


def _called(function: Callable[..., Any], arguments: dict[str, Any], limit: int) -> _Output:
    try:
        return "ok", *_as_text(function(**arguments), limit)
    except BaseException as error:  # noqa: BLE001 - the boundary around the tool, SystemExit included
        return _failed(error, limit)


async def _awaited(work: Awaitable[Any], limit: int) -> _Output:
    try:
        return "ok", *_as_text(await work, limit)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - the boundary around the tool; SystemExit would end the event loop
        return _failed(error, limit)


def _failed(error: BaseException, limit: int) -> _Output:
    return "error", *_clean(f"error: {type(error).__name__}: {_message_of(error)}", limit)


def _as_text(value: Any, limit: int) -> tuple[str, bool]:
    """A tool's result as text of at most `limit` characters plus a note, and whether it was cut."""
    if value is None:
        return "", False
    if isinstance(value, bytes | bytearray | memoryview):
        # Decode only what may be shown: a character has at most four bytes.
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
    """Text without lone surrogates, which tokenizers refuse, cut at `limit` with a note of the `whole` length."""
    cut = len(text) > limit
    if cut:
        text = f"{text[:limit]}\n[cut: {whole or f'{len(text)} characters'}, the first {limit} are shown]"
    return text.encode("utf-8", "replace").decode("utf-8"), cut


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a tool's own exception type may fail to print
        return "(no message)"
