"""What people ask the help for in words that no flag has: a topic says how it is done here, and with which flags.

The topics and the example of `slime train --help` stand in `help_topics.toml`.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Topic:
    """An answer to some words."""

    #: the words that ask for it, in lower case, with `-` between parts
    words: tuple[str, ...]
    text: str
    #: names of flags, without dashes
    flags: tuple[str, ...]
    #: a page of the documentation
    page: str


@functools.cache
def _content() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def topics() -> list[Topic]:
    """All topics."""
    return [Topic(tuple(one["words"]), one["text"], tuple(one["flags"]), one["page"]) for one in _content()["topics"]]


def example() -> str:
    """A command line that begins a run."""
    return str(_content()["example"])


def topics_of(words: Sequence[str]) -> list[Topic]:
    """The topics that a person asks for with these words, which one topic may have joined by `-`."""
    asked = "-".join(words)
    return [topic for topic in topics() if asked in topic.words]
