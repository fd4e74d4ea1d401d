"""Finds out which isolation this machine permits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from slime.errors import SandboxError
from slime.kit.sandbox.inside.landlock import landlock_version
from slime.kit.sandbox.launcher import Launcher
from slime.kit.sandbox.limits import Isolation, Limits


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine permits."""

    #: the best isolation
    isolation: Isolation
    #: why nothing better is permitted; empty for `Isolation.NAMESPACES`
    reason: str


@cache
def machine_isolation() -> Machine:
    """Try each isolation, the best first, and return the first that works.

    The answer is kept; the first call takes some hundredths of a second.
    """
    reasons: list[str] = []
    for isolation in Isolation:
        problem = _try(isolation)
        if isolation is Isolation.FILTER and problem is None and not landlock_version():
            reasons.append("filter: without Landlock, so that programs write wherever this user may")
        if problem is None or isolation is Isolation.LIMITS:
            return Machine(isolation, "; ".join(reasons))
        reasons.append(f"{isolation.value}: {problem}")
    raise AssertionError("the last isolation is always taken")


def _try(isolation: Isolation) -> str | None:
    """Why `isolation` does not work here; None if it does."""
    try:
        with Launcher() as launcher:
            outcome = launcher.run(["/bin/true"], isolation, Limits())
    except SandboxError as error:
        return str(error)
    return None if outcome.kind == "ok" else f"/bin/true ended with {outcome}"
