"""Finds out which isolation this machine permits."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache

from slime.errors import ConfigError, SandboxError
from slime_sandbox.inside.landlock import landlock_version
from slime_sandbox.launcher import Launcher, python_argv, python_folders
from slime_sandbox.limits import Isolation, Limits


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

    Raises:
        SandboxError: Not even the last works: this Python cannot be run as an unprivileged user.
    """
    reasons: list[str] = []
    for isolation in Isolation:
        problem = _try(isolation)
        if problem is None:
            if isolation is Isolation.FILTER and not landlock_version():
                reasons.append("filter: without Landlock, so that programs write wherever this user may")
            return Machine(isolation, "; ".join(reasons))
        reasons.append(f"{isolation.value}: {problem}")
    raise SandboxError(f"no untrusted program can be run on this machine ({'; '.join(reasons)})")


def require_isolation(required: Isolation) -> Machine:
    """What this machine permits, for a component that must not run programs with less than `required`.

    Raises:
        ConfigError: The machine permits less.
    """
    try:
        machine = machine_isolation()
    except SandboxError as error:
        raise ConfigError(str(error)) from error
    if machine.isolation.rank < required.rank:
        raise ConfigError(
            f"require_isolation is {required.value!r}, and this machine permits only {machine.isolation.value!r}"
            f" ({machine.reason}). SECURITY.md describes the levels; require a lower one if nothing on this machine"
            " needs protection"
        )
    return machine


def _try(isolation: Isolation) -> str | None:
    """Why a Python program does not run with `isolation` here; None if it does."""
    try:
        with Launcher() as launcher:
            outcome = launcher.run(python_argv("-c", "pass"), isolation, Limits(), readable=python_folders())
    except SandboxError as error:
        return str(error)
    return None if outcome.kind == "ok" else f"{sys.executable} ended with {outcome}"
