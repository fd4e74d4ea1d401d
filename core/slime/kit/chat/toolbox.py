"""Runs tools for a model: every call returns text before its deadline, even if the tool fails or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from slime.errors import did_you_mean
from slime.kit.chat.tool_calls import ToolCall
from slime.kit.chat.tools import Tool

#: "ok"; "error": the tool raised; "timeout": it took too long; "invalid": the arguments do not fit its signature;
#: "unknown": no such tool; "malformed": the call cannot be read
Kind: TypeAlias = Literal["ok", "error", "timeout", "invalid", "unknown", "malformed"]

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
    #: the tool that was called; empty if no tool has that name
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
        tool, limit = self.tools.get(call.name), self._max_chars
        if tool is None and call.name:
            known = f"known: {', '.join(self.tools)}" if self.tools else "there are none"
            problem = f"no tool is called {call.name!r}; {known}.{did_you_mean(call.name, self.tools)}"
            return _failure("unknown", "", problem, limit)
        if call.problem or tool is None:
            name = "" if tool is None else tool.name
            return _failure("malformed", name, call.problem or "a call without a name", limit)
        try:
            arguments = tool.check(call.arguments)
        except ValueError as error:
            return _failure("invalid", tool.name, str(error), limit)
        if self._hung[tool.name] >= _HUNG:
            return _failure("timeout", tool.name, f"{tool.name} does not answer", limit)
        started = time.perf_counter()
        pending = self._start(tool, arguments)
        try:
            # Not `asyncio.timeout`, which would wait for a tool that ignores its cancellation.
            await asyncio.wait({pending}, timeout=self._timeout_s)
        finally:
            if not pending.done():
                self._abandon(tool, pending)
        if not pending.done():
            problem = f"{tool.name} did not answer within {self._timeout_s:g} s"
            result = _failure("timeout", tool.name, problem, limit)
        elif pending.cancelled():
            result = _failure("error", tool.name, f"{tool.name} cancelled itself", limit)
        else:
            result = pending.result()
        return replace(result, seconds=time.perf_counter() - started)

    def _start(self, tool: Tool, arguments: dict[str, Any]) -> asyncio.Future[ToolResult]:
        """Start a call; its result is never an exception."""
        loop = asyncio.get_running_loop()
        if inspect.iscoroutinefunction(tool.function):
            return loop.create_task(_awaited(tool, arguments, self._max_chars))
        pending: asyncio.Future[ToolResult] = loop.create_future()
        context = contextvars.copy_context()

        def run() -> None:
            result = context.run(_called, tool, arguments, self._max_chars)
            with contextlib.suppress(RuntimeError):  # the loop may have ended
                loop.call_soon_threadsafe(pending.set_result, result)

        # Not a pool, which hanging calls would fill up. A daemon, so that it does not keep the process alive.
        threading.Thread(target=run, name=f"tool-{tool.name}", daemon=True).start()
        return pending

    def _abandon(self, tool: Tool, pending: asyncio.Future[ToolResult]) -> None:
        """Stop waiting for a call; it counts as hanging until it ends."""

        def ended(_: asyncio.Future[ToolResult]) -> None:
            self._hung[tool.name] -= 1

        self._hung[tool.name] += 1
        pending.add_done_callback(ended)
        if isinstance(pending, asyncio.Task):
            pending.cancel()


def _called(tool: Tool, arguments: dict[str, Any], limit: int) -> ToolResult:
    try:
        return _success(tool, tool.function(**arguments), limit)
    except BaseException as error:  # noqa: BLE001 - the boundary around the tool, SystemExit included
        return _raised(tool, error, limit)


async def _awaited(tool: Tool, arguments: dict[str, Any], limit: int) -> ToolResult:
    try:
        return _success(tool, await tool.function(**arguments), limit)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - the boundary around the tool; SystemExit would end the event loop
        return _raised(tool, error, limit)


def _raised(tool: Tool, error: BaseException, limit: int) -> ToolResult:
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - a tool's own exception type may fail to print
        message = "(no message)"
    return _failure("error", tool.name, f"{type(error).__name__}: {message}", limit)


def _failure(kind: Kind, tool: str, problem: str, limit: int) -> ToolResult:
    text, cut = _clean(f"error: {problem}", limit)
    return ToolResult(text, kind, tool, cut=cut)


def _success(tool: Tool, value: Any, limit: int) -> ToolResult:
    text, cut = _as_text(value, limit)
    return ToolResult(text, "ok", tool.name, cut=cut)


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
