"""SIGTERM to a run that saves checkpoints: it saves after its current step and ends, within `--preemption-timeout-s`.

If the step does not end in time, the run ends without it. What it had saved before is complete in any case.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.config import RunConfig
from slime.errors import PreemptedError
from slime.run.signals import end_at_once, say

#: at most this much of the time, in seconds and as a share, is kept for ending all processes in order
_ENDING_S, _ENDING_SHARE = 15.0, 0.25


class Preemption:
    """Whether SIGTERM has asked a run to end, and until when."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        """Describe the run, which does not accept to be preempted before `accepted`."""
        self._timeout_s = config.checkpoint.preemption_timeout_s
        self._saves = config.checkpoint.save is not None
        self._run_dir = run_dir
        self._accepting = False
        self._asked_at: float | None = None
        self._last_resort = threading.Timer(self._timeout_s, self._end_at_once)
        self._last_resort.daemon = True

    @property
    def asked(self) -> bool:
        """Whether the run has to end after its current step."""
        return self._asked_at is not None

    @contextmanager
    def accepted(self) -> Iterator[None]:
        """In the body, the loop of a run that saves, SIGTERM asks the run to end."""
        self._accepting = self._saves
        try:
            yield
        finally:
            self._accepting = False

    @property
    def accepts(self) -> bool:
        """Whether SIGTERM asks the run to end; otherwise it interrupts the run like Ctrl-C."""
        return self._accepting or self.asked

    def ask(self) -> str:
        """Ask the run to end after its current step; the answer for the user."""
        if self.asked:
            return "slime: SIGTERM again: still ending the run; Ctrl-C ends it without waiting for the step"
        self._asked_at = time.monotonic()
        self._last_resort.start()
        return f"slime: SIGTERM: saving a checkpoint after this step, then ending, within {self._timeout_s:g} s"

    def check(self) -> None:
        """Called during every wait of the run: raises if the step has to be given up, so that the run ends in time."""
        if self._asked_at is None:
            return
        ending_s = min(_ENDING_S, _ENDING_SHARE * self._timeout_s)
        if time.monotonic() > self._asked_at + self._timeout_s - ending_s:
            raise PreemptedError(
                f"preempted: the step did not end in time after SIGTERM (--preemption-timeout-s {self._timeout_s:g});"
                " what was saved before is complete"
            )

    def _end_at_once(self) -> None:
        say(
            f"slime: ended at once, {self._timeout_s:g} s after SIGTERM (--preemption-timeout-s). What was saved before"
            f" is complete; to continue:\n  slime train --resume {self._run_dir}"
        )
        end_at_once(PreemptedError.exit_code)

    def close(self) -> None:
        """The run has ended."""
        self._last_resort.cancel()
