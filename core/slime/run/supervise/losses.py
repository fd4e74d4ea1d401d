"""What the loss of a process is called, and what it leads to: a restart of this part, of the whole run, or its end."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Loss:
    """What follows when a process of one kind has ended or hangs."""

    #: what is raised if it is not restarted
    error: type[SlimeError]
    #: with `--use-fault-tolerance`: whether this process alone is started again while the run goes on, or the whole run
    restarted_alone: bool = False


#: Of processes that were lost together, the first of these is named as the cause: without Ray all others end.
LOSSES: dict[PartKind, Loss] = {
    "ray": Loss(ClusterError),
    "trainer": Loss(ProcessDiedError),
    "engine": Loss(EngineError, restarted_alone=True),
    "router": Loss(EngineError, restarted_alone=True),
    "rollout": Loss(ProcessDiedError),
}
CAUSES: tuple[PartKind, ...] = tuple(LOSSES)

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
