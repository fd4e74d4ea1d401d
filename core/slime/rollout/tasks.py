"""Running many coroutines where the first error ends them all."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

#: seconds cancelled tasks may take to end before they are left behind
CANCEL_TIMEOUT_S = 10.0


async def all_or_first_error(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order.  The first error, or a cancellation, cancels the others and is raised.

    What was cancelled is waited for (at most `CANCEL_TIMEOUT_S`), so that nothing runs on unseen.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S)
        raise
    finally:
        # A second failure, after the first was raised, is not an unhandled one.
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()
