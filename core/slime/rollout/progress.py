"""How far the rollout is that is waited for."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[int, int], None]


class Tally:
    """Samples done and wanted, of one rollout or evaluation."""

    def __init__(self, board: ProgressBoard, total: int) -> None:
        self.done = 0
        self.total = total
        self._board = board

    def advance(self) -> None:
        """One sample more is done."""
        self.done += 1
        self._board.report()


class ProgressBoard:
    """Reports the oldest unfinished tally: later rollouts generated ahead do not blur the bar."""

    def __init__(self, callback: ProgressCallback | None) -> None:
        """`callback(done, total)` in samples."""
        self._callback = callback
        self._open: list[Tally] = []

    def open(self, total: int) -> Tally:
        """Start counting."""
        tally = Tally(self, total)
        self._open.append(tally)
        self.report()
        return tally

    def close(self, tally: Tally) -> None:
        """Stop counting."""
        self._open.remove(tally)

    def report(self) -> None:
        """Tell how far the oldest one is."""
        if self._callback is not None and self._open:
            self._callback(self._open[0].done, self._open[0].total)
