"""Calls components as a run does, one event loop for all calls, with a deadline that a busy loop cannot outlast."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as Unfinished
from types import TracebackType
from typing import Any

_CLOSING_S = 5.0


class Caller:
    """An event loop in a thread of its own.  What hangs there is left behind when the kit gives up on it.

        with Caller() as caller:
            rewards = caller.call(lambda: reward.score(samples), timeout_s=60, what="Reward.score")

    One loop serves every call, since components may keep connections that belong to a loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="slime-testing", daemon=True)

    def __enter__(self) -> Caller:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSING_S)
        if not self._thread.is_alive():
            self._loop.close()

    def call(self, make: Callable[[], Any], *, timeout_s: float, what: str) -> Any:
        """What `make()` returns, awaited where it is awaitable.

        Raises what it raises, and `AssertionError` where it takes longer than `timeout_s` or calls sys.exit().
        """
        future = asyncio.run_coroutine_threadsafe(_finish(make, what), self._loop)
        try:
            return future.result(timeout_s)
        except Unfinished:
            if future.done():
                raise
            future.cancel()
            raise AssertionError(f"{what} took longer than {timeout_s:g} s; expected an answer by then") from None

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())


async def _finish(make: Callable[[], Any], what: str) -> Any:
    try:
        answer = make()
        return await answer if inspect.isawaitable(answer) else answer
    except SystemExit as error:
        raise AssertionError(f"{what} called sys.exit({error.code!r}); expected an answer or an exception") from error
