"""How a fault is written on a sample, and how many faults are told in few words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from slime.types import Sample, Status

#: characters of one reason
REASON_LENGTH = 300


class Cause(Enum):
    """What a component did instead of answering."""

    RAISED = "raised"
    HUNG = "hung"  #: no answer within its deadline
    DIED = "died"  #: its process ended
    CONTRACT = "contract"  #: it answered what its contract forbids


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a component has no good answer for a sample."""

    cause: Cause
    #: one line that names the component
    reason: str


def reason_of(who: str, error: BaseException) -> str:
    """One line naming the component and its error."""
    return shorten(f"{who}: {describe(error)}")


def describe(error: BaseException) -> str:
    """An exception in one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def shorten(reason: str) -> str:
    """At most `REASON_LENGTH` characters."""
    return reason if len(reason) <= REASON_LENGTH else reason[: REASON_LENGTH - 1] + "…"


def mark(samples: Iterable[Sample], status: Status, reason: str) -> None:
    """Write the fault on every sample; none of them is trainable any more."""
    for sample in samples:
        sample.status = status
        sample.failure = reason


def common_reasons(samples: Iterable[Sample], limit: int = 3) -> list[str]:
    """`12x REASON`, the most frequent first."""
    reasons = Counter(sample.failure or sample.status.value for sample in samples if not sample.trainable)
    return [f"{count}x {reason}" for reason, count in reasons.most_common(limit)]


def count_status(samples: Sequence[Sample], status: Status) -> int:
    """How many samples have `status`."""
    return sum(1 for sample in samples if sample.status is status)
