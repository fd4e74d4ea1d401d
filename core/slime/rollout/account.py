"""What the ledger knows of one group: where it is, and how it came there."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from slime.types import Group

#: notes kept of a group's history; it is cut in the middle
NOTES = 12
#: characters of a prompt in messages
PROMPT_LENGTH = 60


class Where(Enum):
    """Where a group can be.  Trained on or dropped, it is closed and has no account any more."""

    WAITING = "waiting"  #: taken from the data source, and nobody is generating it
    IN_FLIGHT = "in flight"  #: being generated and scored
    BUFFERED = "buffered"
    BATCH = "in a batch"


@dataclass(slots=True)
class Account:
    """One open group."""

    #: how many groups were taken before it
    place: int
    #: indices of the samples that were asked for
    samples: tuple[int | None, ...]
    #: the beginning of its prompt, for messages
    prompt: str
    where: Where
    #: times it was trained on
    uses: int = 0
    history: list[str] = field(default_factory=list)

    def note(self, event: str) -> None:
        """Remember what happened."""
        if len(self.history) == NOTES:
            del self.history[NOTES // 2]
        self.history.append(event)

    def told(self, index: int) -> str:
        """The group in one line: its prompt, where it should be, and its history."""
        return f"group {index} ({self.prompt!r}), {self.where.value}; its history: {', '.join(self.history)}"


def prompt_of(group: Group) -> str:
    """The beginning of a group's prompt as one line."""
    prompt = group.samples[0].prompt if group.samples else ""
    if not isinstance(prompt, str):
        prompt = str(prompt[-1].get("content", "")) if prompt else ""
    return " ".join(prompt[: 2 * PROMPT_LENGTH].split())[:PROMPT_LENGTH]
