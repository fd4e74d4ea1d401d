"""Metrics of a conversation's tool calls."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from slime.kit.chat import ToolResult


class ToolMetrics:
    """Counts the tool calls of one conversation.

    Every sample reports all tools of the run, so that the logged means are per conversation.
    """

    def __init__(self, tools: Iterable[str]) -> None:
        self.turns = 0
        #: seconds the conversation waited for tools
        self.seconds = 0.0
        self._unknown = self._malformed = 0
        self._tools = {name: _Counts() for name in tools}

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the duration of the block to `seconds`, even if it raises."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started

    def count(self, results: Sequence[ToolResult]) -> None:
        """Count the results of one turn."""
        for result in results:
            if not result.tool:
                self._unknown += result.kind == "unknown"
                self._malformed += result.kind == "malformed"
                continue
            counts = self._tools[result.tool]
            counts.calls += 1
            counts.errors += result.kind in ("error", "invalid", "malformed")
            counts.timeouts += result.kind == "timeout"
            counts.cut += result.cut
            counts.seconds += result.seconds

    def of_sample(self) -> dict[str, float]:
        """For `Sample.metrics`: turns, calls of no known tool, and each tool's calls, errors, timeouts and seconds."""
        numbers = {
            "turns": float(self.turns),
            "tools/unknown_calls": float(self._unknown),
            "tools/malformed_calls": float(self._malformed),
        }
        for name, counts in self._tools.items():
            numbers |= {f"tools/{name}/{what}": float(value) for what, value in vars(counts).items()}
        return numbers


class _Counts:
    def __init__(self) -> None:
        self.calls = self.errors = self.timeouts = self.cut = 0
        self.seconds = 0.0
