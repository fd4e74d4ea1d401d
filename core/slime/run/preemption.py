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
from slime.errors import PreemptedError, SlimeError
from slime.run.signals import end_at_once, say
from slime.run.supervise.losses import is_curable

#: at most this much of the time, in seconds and as a share, is kept for ending all processes in order
_ENDING_S, _ENDING_SHARE = 15.0, 0.25


class Preemption:
    """Whether SIGTERM has asked a run to end, and until when."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        """Describe the run, which does not accept to be preempted before `accepted`."""
        self._timeout_s = config.checkpoint.preemption_timeout_s
        self._saves = config.checkpoint.save is not None
        self._run_dir = run_dir
        #: whether the run was in its loop before, and is now
        self._begun = self._in_loop = False
        self._asked_at: float | None = None
        self._last_resort = threading.Timer(self._timeout_s, self._end_at_once)
        self._last_resort.daemon = True

    @property
    def asked(self) -> bool:
        """Whether the run has to end after its current step."""
        return self._asked_at is not None

    @contextmanager
    def accepted(self) -> Iterator[None]:
        """In the body, the loop of a run, SIGTERM asks the run to end after its step, if it saves.

        From then on SIGTERM asks the run to end at any time, also while it ends or starts again.
        """
        self._begun = self._in_loop = self._saves
        try:
            yield
        finally:
            self._in_loop = False

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """If the body fails after SIGTERM because something was lost, say that the run was preempted.

        Batch systems may send SIGTERM to all processes, and Ray's end by it.
        """
        try:
            yield
        except SlimeError as error:
            if not self.asked or not is_curable(error, first=False):
                raise
            cause = str(error).partition("\n")[0]
            raise PreemptedError(
                f"preempted: ended by SIGTERM; what was saved before is complete. Before the end: {cause}"
            ) from error

    @property
    def accepts(self) -> bool:
        """Whether SIGTERM asks the run to end; otherwise it interrupts the run like Ctrl-C."""
        return self._begun or self.asked

    def ask(self) -> str:
        """Ask the run to end after its current step; the answer for the user."""
        if self.asked:
            return "slime: SIGTERM again: still ending the run; Ctrl-C ends it without waiting for the step"
        self._asked_at = time.monotonic()
        self._last_resort.start()
        if not self._in_loop:
            return f"slime: SIGTERM: ending the run, within {self._timeout_s:g} s"
        return f"slime: SIGTERM: saving a checkpoint after this step, then ending, within {self._timeout_s:g} s"

    def check(self) -> None:
        """Called during every wait of the run: raises if the step has to be given up, so that the run ends in time."""
        if self._asked_at is None:
            return
        if not self._in_loop:
            raise PreemptedError("preempted: ended by SIGTERM while the run started again; what was saved is complete")
        ending_s = min(_ENDING_S, _ENDING_SHARE * self._timeout_s)
        if time.monotonic() > self._asked_at + self._timeout_s - ending_s:
            raise PreemptedError(
                "preempted: the step or an evaluation did not end in time after SIGTERM (--preemption-timeout-s"
                f" {self._timeout_s:g}); what was saved before is complete"
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
