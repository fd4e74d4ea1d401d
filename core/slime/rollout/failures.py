"""How a fault is written on a sample, and how many faults are told in few words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from slime.types import Sample, Status

#: characters of one reason
REASON_LENGTH = 300


def reason_of(who: str, error: BaseException) -> str:
    """One line naming the component and its error."""
    message = " ".join(str(error).split())
    return shorten(f"{who}: {type(error).__name__}: {message}" if message else f"{who}: {type(error).__name__}")


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
