"""Runs coroutines concurrently: the first error cancels the others, and none is left running unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

#: seconds cancelled tasks may take to end before they are left behind
CANCEL_TIMEOUT_S = 10.0


async def all_or_first_error(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first error, or a cancellation, cancels the others and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await cancel(tasks)
        raise


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel what is still running and wait for it, at most `CANCEL_TIMEOUT_S`. Errors of tasks are dropped."""
    tasks = list(tasks)
    if running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_TIMEOUT_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # asyncio would log it as never retrieved
