"""What the loss of a process is called, and what it leads to: a restart of this part, of the whole run, or its end."""

from __future__ import annotations

from typing import Literal

from slime.errors import (
    ClusterError,
    ClusterStartError,
    DeadlineError,
    EngineError,
    EngineStartError,
    ProcessDiedError,
    SlimeError,
    UnexpectedError,
    WeightSyncError,
)

PartKind = Literal["ray", "trainer", "engine", "router", "rollout"]


#: What is raised when a process of this kind has ended or hangs, if it is not restarted. Of processes that were lost
#: together, the first of these is named as the cause: without Ray all others end.
LOSSES: dict[PartKind, type[SlimeError]] = {
    "ray": ClusterError,
    "trainer": ProcessDiedError,
    "engine": EngineError,
    "router": EngineError,
    "rollout": ProcessDiedError,
}
#: with `--use-fault-tolerance` these alone are started again while the run goes on; for others the whole run is
RESTARTED_ALONE: frozenset[PartKind] = frozenset(("engine", "router"))

#: errors after which another attempt of the run may end better: a process, a part of Ray, or an answer was lost
_CURABLE = (ProcessDiedError, ClusterError, EngineError, WeightSyncError, DeadlineError)
#: Not in the first attempt, where the reason is usually the configuration. In a later one it may be the machine.
_AT_START = (EngineStartError, ClusterStartError)
#: torch's errors about a lost neighbour or device, by the names that their messages contain
_OF_TORCH = ("DistBackendError", "DistNetworkError", "DistStoreError", "AcceleratorError")


def is_curable(error: SlimeError, *, first: bool) -> bool:
    """Whether another attempt may end better than one that ended with `error`.

    Bad input, failures of plugins, numbers that are not finite, damaged files and full disks would come again.

    Args:
        error: Why an attempt ended.
        first: Whether that was the first.
    """
    if isinstance(error, UnexpectedError):
        return any(name in str(error) for name in _OF_TORCH)
    return isinstance(error, _CURABLE) and not (first and isinstance(error, _AT_START))
