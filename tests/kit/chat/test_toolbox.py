"""Every call returns a text in time, for any behaviour of the tool."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from slime.kit.chat import Toolbox, ToolCall, ToolResult, tool_of

RELEASE = threading.Event()


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def greet(name: str) -> str:
    """Greet."""
    await asyncio.sleep(0)
    return f"hello {name}"


def run(function: Callable[..., Any], arguments: dict[str, Any] | None = None, **limits: Any) -> ToolResult:
    box = Toolbox([tool_of(function)], **limits)
    return asyncio.run(box.run(ToolCall(function.__name__, arguments or {})))


def test_functions_and_coroutines_answer() -> None:
    result = run(add, {"a": 2, "b": "3"})
    assert (result.text, result.kind, result.tool, result.cut) == ("5", "ok", "add", False)
    assert run(greet, {"name": "you"}).text == "hello you"


def test_the_note_on_cut_bytes_has_their_number() -> None:
    result = run(returning(b"x" * 10_000), max_chars=8)
    assert result.text == "xxxxxxxx\n[cut: 10000 bytes, the first 8 are shown]" and result.cut


def test_at_most_16_of_many_calls_run_at_once() -> None:
    running = most = 0

    async def busy() -> int:
        """Be counted."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return most

    results = asyncio.run(Toolbox([tool_of(busy)]).run_all([ToolCall("busy")] * 200))
    assert len(results) == 200 and {result.kind for result in results} == {"ok"}
    assert most == 16


def returning(value: Any) -> Callable[[], Any]:
    def tool() -> Any:
        """Return it."""
        return value

    return tool


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("é", "é"),
        (None, ""),
        (b"\xff\xfeab", "\ufffd\ufffdab"),
        ("half \ud800", "half ?"),
        ({"a": [1, "é"]}, '{"a": [1, "é"]}'),
        (3.5, "3.5"),
        ({1, 2}, "{1, 2}"),
    ],
)
def test_any_result_becomes_text(value: Any, text: str) -> None:
    result = run(returning(value))
    assert (result.text, result.kind) == (text, "ok")
    result.text.encode("utf-8")


@pytest.mark.parametrize("value", ["x" * 10_000_000, b"x" * 10_000_000, ["x" * 10_000_000]])
def test_a_long_result_is_cut_with_a_note(value: Any) -> None:
    result = run(returning(value), max_chars=100)
    assert result.cut
    assert result.kind == "ok"
    assert len(result.text) < 200
    assert ", the first 100 are shown]" in result.text and "[cut: 10000" in result.text


def test_a_tool_that_raises_gives_an_error() -> None:
    def broken() -> str:
        """Break."""
        raise KeyError("no such row")

    result = run(broken)
    assert (result.text, result.kind) == ("error: KeyError: 'no such row'", "error")


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), StopIteration(1), asyncio.CancelledError()])
def test_no_exception_of_a_tool_ends_the_run(raised: BaseException) -> None:
    def wild() -> str:
        """Break out."""
        raise raised

    async def async_wild() -> str:
        """Break out."""
        raise raised

    assert run(wild).kind == "error"
    assert run(async_wild).kind == "error"


def test_an_error_that_cannot_be_printed_is_still_reported() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def broken() -> str:
        """Break."""
        raise OddError

    assert run(broken).text == "error: OddError: (no message)"


def test_a_result_that_cannot_be_printed_is_an_error() -> None:
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert run(returning(Odd())).text == "error: RuntimeError: no text"


@pytest.mark.slow
def test_a_tool_that_hangs_is_abandoned_and_others_continue() -> None:
    def hang() -> str:
        """Hang."""
        RELEASE.wait(60)
        return "late"

    async def async_hang() -> str:
        """Hang."""
        await asyncio.sleep(60)
        return "late"

    box = Toolbox([tool_of(add), tool_of(hang), tool_of(async_hang)], timeout_s=1.5)
    calls = [ToolCall("hang"), ToolCall("add", {"a": 1, "b": 2}), ToolCall("async_hang")]
    started = time.monotonic()
    results = asyncio.run(box.run_all(calls))
    RELEASE.set()
    assert time.monotonic() - started < 30
    assert [result.kind for result in results] == ["timeout", "ok", "timeout"]
    assert results[0].text == "error: hang did not answer within 1.5 s"
    assert results[1].text == "3"


@pytest.mark.slow
def test_a_tool_that_always_hangs_is_no_longer_called() -> None:
    release = threading.Event()
    calls = 0

    def hang() -> str:
        """Hang."""
        nonlocal calls
        calls += 1
        release.wait(60)
        return "late"

    async def scenario() -> list[ToolResult]:
        box = Toolbox([tool_of(hang)], timeout_s=0.5)
        first = await box.run_all([ToolCall("hang")] * 64)
        later = await box.run_all([ToolCall("hang")] * 3)
        release.set()
        for _ in range(600):
            await asyncio.sleep(0.05)
            if box._hung["hang"] == 0:
                break
        return [*first, *later, await box.run(ToolCall("hang"))]

    results = asyncio.run(scenario())
    assert [result.kind for result in results] == ["timeout"] * 67 + ["ok"]
    assert results[-2].text == "error: hang does not answer"
    assert calls == 65


@pytest.mark.slow
def test_a_coroutine_that_ignores_cancellation_is_abandoned() -> None:
    async def stubborn() -> str:
        """Go on."""
        for _ in range(20):
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue
        return "late"

    async def scenario() -> tuple[ToolResult, int, int]:
        box = Toolbox([tool_of(stubborn)], timeout_s=0.1)
        result = await box.run(ToolCall("stubborn"))
        hanging = box._hung["stubborn"]
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        return result, hanging, box._hung["stubborn"]

    result, hanging, left = asyncio.run(scenario())
    assert result.kind == "timeout"
    assert (hanging, left) == (1, 0)


def test_calls_of_one_turn_run_at_the_same_time() -> None:
    meeting = threading.Barrier(3)

    def meet() -> str:
        """Wait for the others."""
        meeting.wait(20)
        return "met"

    results = asyncio.run(Toolbox([tool_of(meet)]).run_all([ToolCall("meet")] * 3))
    assert [result.text for result in results] == ["met"] * 3


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (ToolCall("ad"), "unknown", "error: no tool is called 'ad'; known: add. Did you mean add?"),
        (ToolCall("\ud800"), "unknown", "error: no tool is called '\\ud800'; known: add."),
        (ToolCall("add", {"a": 1}), "invalid", "error: wrong arguments for add: b: Field required"),
        (ToolCall(problem="the tool call is not valid JSON"), "malformed", "error: the tool call is not valid JSON"),
        (
            ToolCall("add", problem="its arguments are not an object"),
            "malformed",
            "error: its arguments are not an object",
        ),
    ],
)
def test_calls_that_reach_no_tool_give_an_error(call: ToolCall, kind: str, text: str) -> None:
    result = asyncio.run(Toolbox([tool_of(add)]).run(call))
    assert (result.kind, result.text) == (kind, text)


def test_a_cancelled_conversation_ends_at_once() -> None:
    release = threading.Event()

    def hang() -> str:
        """Hang."""
        release.wait(20)
        return "late"

    async def scenario() -> float:
        task = asyncio.ensure_future(Toolbox([tool_of(hang)]).run(ToolCall("hang")))
        await asyncio.sleep(0.05)
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()
        return time.monotonic() - started

    assert asyncio.run(scenario()) < 5
