"""The driver's part in logging per-token columns: from trainer rank 0 to the rollout process, beside the next step."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from slime.run.remote_trainer import TrainerProcess
from slime.run.rollout_process import RolloutProcess

if TYPE_CHECKING:
    from slime.observe.observer import RunObserver
    from slime.run.workers import PendingCall, Workers

#: rollouts that may wait to be written; a driver that is ahead by more waits for the disk, so that memory is bounded
_WAITING = 2


class TokenLog:
    """Hands columns over without holding them. A file that cannot be written is told, and never ends the run."""

    def __init__(self, trainer: Workers, rollout: Workers, observer: RunObserver, *, on: bool) -> None:
        """`on`: whether anything is logged."""
        self._trainer, self._rollout, self._observer, self._on = trainer, rollout, observer, on
        self._pending: deque[tuple[int, PendingCall[str | None]]] = deque()
        self._failing = False

    def begin(self, number: int) -> None:
        """Let the rollout process write the columns of a rollout that was just trained on."""
        if not self._on:
            return
        self.finish(most=_WAITING - 1)
        logged = self._trainer.begin(TrainerProcess.logged_tokens, doing="handing over per-token columns", only=0)
        # As an argument the reference arrives as the object, straight from the trainer.
        doing = f"writing the per-token columns of rollout {number}"
        pending = self._rollout.begin(RolloutProcess.write_token_columns, number, logged.refs[0], doing=doing)
        self._pending.append((number, pending))

    def finish(self, *, most: int = 0) -> None:
        """Wait until at most so many rollouts are not written yet."""
        while len(self._pending) > most or (self._pending and self._pending[0][1].finished):
            number, pending = self._pending.popleft()
            [problem] = pending.wait()
            if problem is not None and not self._failing:
                self._observer.columns_lost(number, problem)
            self._failing = problem is not None
