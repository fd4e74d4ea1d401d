"""Runs tools for a model: whatever the tool or the call does, there is a text to answer with, in time."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from slime.chat.tool_calls import ToolCall
from slime.chat.tools import Tool
from slime.errors import did_you_mean

#: "ok"; "error": the tool raised; "timeout": it took too long; "invalid": arguments that do not fit its signature;
#: "unknown": no such tool; "malformed": the call cannot be read
Kind: TypeAlias = Literal["ok", "error", "timeout", "invalid", "unknown", "malformed"]

#: threads of one tool that may hang before it is not called any more
_HUNG = 64


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
      left behind, and after 64 of one tool it is not called any more: every further call is a timeout at once.
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
        """The results of the calls of one turn, in order; the calls run at the same time."""
        if len(calls) == 1:
            return [await self.run(calls[0])]
        return list(await asyncio.gather(*(self.run(call) for call in calls)))

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
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                if inspect.iscoroutinefunction(tool.function):
                    text, cut = _as_text(await tool.function(**arguments), self._max_chars)
                else:
                    text, cut = await self._in_thread(
                        tool, lambda: _as_text(tool.function(**arguments), self._max_chars)
                    )
            kind: Kind = "ok"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            kind, text, cut = "error", f"error: {tool.name} cancelled itself", False
        except Exception as error:  # noqa: BLE001 - the boundary around the tool
            if deadline.expired():
                kind, text, cut = "timeout", f"error: {tool.name} did not answer within {self._timeout_s:g} s", False
            else:
                kind = "error"
                text, cut = _clean(f"error: {type(error).__name__}: {_said(error)}", self._max_chars)
        return ToolResult(text, kind, tool.name, time.perf_counter() - started, cut)

    async def _in_thread(self, tool: Tool, work: Callable[[], tuple[str, bool]]) -> tuple[str, bool]:
        """`work()` in a thread that does not keep the process alive, so that one that hangs harms nobody."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[str, bool]] = loop.create_future()
        # Deadlines of other calls need the loop, and a thread pool would fill up with what hangs.
        context = contextvars.copy_context()

        def settle(result: tuple[str, bool] | None, error: BaseException | None) -> None:
            if done.cancelled():
                self._hung[tool.name] -= 1
            elif error is None and result is not None:
                done.set_result(result)
            else:
                # An exception that asyncio gives a meaning of its own must not pass through a future.
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                done.set_exception(
                    error if plain and error is not None else RuntimeError(f"{type(error).__name__}: {error}")
                )

        def run() -> None:
            result, error = None, None
            try:
                result = context.run(work)
            except BaseException as raised:  # noqa: BLE001 - the boundary around the tool, SystemExit included
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        threading.Thread(target=run, name=f"tool-{tool.name}", daemon=True).start()
        try:
            return await done
        except asyncio.CancelledError:
            self._hung[tool.name] += 1
            raise

    def _told(self, kind: Kind, tool: str, text: str) -> ToolResult:
        text, cut = _clean(f"error: {text}", self._max_chars)
        return ToolResult(text, kind, tool, 0.0, cut)


def _as_text(value: Any, limit: int) -> tuple[str, bool]:
    """A tool's result as text of at most `limit` characters and the note, and whether it was cut."""
    if value is None:
        return "", False
    if isinstance(value, bytes | bytearray | memoryview):
        # Not all of ten megabytes: no character is more than four bytes.
        value = bytes(value[: 4 * limit + 4]).decode("utf-8", "replace")
    elif not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            value = str(value)
    return _clean(value, limit)


def _clean(text: str, limit: int) -> tuple[str, bool]:
    """Text that a tokenizer takes (no lone surrogates), cut at `limit` with a note."""
    cut = len(text) > limit
    if cut:
        text = f"{text[:limit]}\n[cut: {len(text)} characters, the first {limit} are shown]"
    return text.encode("utf-8", "replace").decode("utf-8"), cut


def _said(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception of the tool's own that cannot even be printed
        return "(no message)"
