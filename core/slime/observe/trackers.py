"""The trackers of a run. Each runs in its own thread, and its errors never end the run."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from slime.errors import disk_full, is_disk_full
from slime.errors.raised import Raised, report
from slime.plugin import Tracker

#: rows that may wait for a slow or hanging tracker; later ones are lost
MAX_WAITING = 10_000
#: seconds that all trackers together have to finish at the end of a run
CLOSE_S = 30.0

logger = logging.getLogger(__name__)


class TrackerThread:
    """Builds one tracker and passes metrics to it, in a separate thread.

    The first error is logged; rows that the tracker did not accept are counted.
    """

    def __init__(
        self, name: str, build: Callable[[], Tracker], *, folder: Path | None = None, max_waiting: int = MAX_WAITING
    ) -> None:
        """Start the thread.

        Args:
            name: For messages: "tracker wandb".
            build: Builds the tracker, in the thread.
            folder: Where it writes, for messages.
            max_waiting: Rows that may wait for the tracker.
        """
        self.name = name
        #: rows passed to it, and rows it accepted
        self.rows = self.written = 0
        self._folder = folder
        #: what went wrong first
        self._error: str | None = None
        #: (step, metrics) of each row, and finally the outcome of the run
        self._queue: queue.Queue[tuple[int, Mapping[str, float]] | str] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._run, args=(build,), name=f"slime-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of one step; never blocks."""
        self.rows += 1
        try:
            self._queue.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._failed(TimeoutError(f"{self._queue.maxsize} rows are waiting for it"))

    def finish(self, outcome: str) -> None:
        """Tell the tracker to close after the last row; returns at once. A full queue drops its oldest row."""
        while True:
            try:
                return self._queue.put_nowait(outcome)
            except queue.Full:
                with suppress(queue.Empty):
                    self._queue.get_nowait()

    def join(self, timeout_s: float) -> str | None:
        """Wait until the tracker has closed, for at most `timeout_s` seconds.

        Returns:
            What went wrong, in one line; None if nothing did.
        """
        self._thread.join(timeout_s)
        hangs = " and has not finished" if self._thread.is_alive() else ""
        lost = self.rows - self.written
        if not (lost or hangs or self._error):
            return None
        reason = "" if self._error is None else f" ({self._error})"
        return f"{self.name} missed {lost} of {self.rows} rows{hangs}{reason}"

    def _run(self, build: Callable[[], Tracker]) -> None:
        tracker: Tracker | None = None
        with self._boundary():
            tracker = build()
        while not isinstance(item := self._queue.get(), str):
            if tracker is not None:
                with self._boundary():
                    step, metrics = item
                    tracker.log(step, {name: float(n) for name, n in metrics.items() if math.isfinite(n)})
                    self.written += 1
        if tracker is not None:
            with self._boundary():
                tracker.close(item)

    @contextmanager
    def _boundary(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - whatever a plugin raises is attributed to it
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        if self._error is None:
            if is_disk_full(error):
                self._error = disk_full(error, self._folder)
                told = f"{self.name} failed: {self._error}"
            else:
                self._error, told = str(Raised.of(error)), report(f"{self.name} failed", error)
            logger.warning("%s\n  The run continues.", told)


def close_all(trackers: Sequence[TrackerThread], outcome: str, timeout_s: float = CLOSE_S) -> Iterator[str]:
    """Close `trackers` within `timeout_s` seconds in total. Yields one line for each that had problems."""
    deadline = time.monotonic() + timeout_s
    for tracker in trackers:
        tracker.finish(outcome)
    for tracker in trackers:
        if (problem := tracker.join(max(0.0, deadline - time.monotonic()))) is not None:
            yield problem
