"""Waiting for actors: always with a deadline, always able to say what was waited for and who died."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from slime.errors import DeadlineError, SlimeError

#: called while waiting, about every `TICK_S`; it may raise to end the wait (a dead engine, say)
Watch = Callable[[], None]

TICK_S = 0.25


def wait_for(refs: Sequence[Any], what: str, timeout_s: float, watch: Watch | None = None) -> list[Any]:
    """The results of `refs`, in order.

    Raises the `SlimeError` that an actor raised as it is; `DeadlineError` after `timeout_s`; an actor
    that died becomes a `SlimeError` that names `what`.
    """
    deadline = time.monotonic() + timeout_s
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=TICK_S if watch else min(TICK_S * 4, 1.0))
        for ref in done:
            _get(ref, what)
        if pending and watch is not None:
            watch()
        if pending and time.monotonic() > deadline:
            raise DeadlineError(
                f"{what}: {len(pending)} of {len(refs)} processes had not answered after {timeout_s:.0f} s. "
                f"Their logs are under logs/ in the run folder."
            )
    return [_get(ref, what) for ref in refs]


def _get(ref: Any, what: str) -> Any:
    """`ray.get` whose failures speak our words."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SlimeError):
            raise cause from None
        raise SlimeError(f"{what}: {type(cause).__name__}: {cause}\n{error}") from None
    except RayActorError as error:
        # First line: what Ray noticed; last line: the exception, where the process died of one while starting.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
        raise SlimeError(f"{what}: the process died ({told}). Its log is under logs/ in the run folder.") from None
