"""The rows of one order, one by one, epoch after epoch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from slime.data.dataset import too_many
from slime.data.feed.order import Order
from slime.data.feed.work import Drawn, Job
from slime.data.feed.workers import Answer
from slime.data.rows import PromptRow
from slime.errors import CheckpointError, DataError

logger = logging.getLogger(__name__)
#: rows that are left out and told one by one
_TOLD = 10


class Performer(Protocol):
    """Who does the work: `InProcess` or `Workers`."""

    #: jobs that are worth submitting before they are wanted
    ahead: int

    def submit(self, job: Job) -> Answer:
        """Begin a job; the answer gives its rows."""
        ...


class Stream:
    """Draws rows.  Where it stands is an epoch and a position in its order, whoever does the work."""

    def __init__(
        self, order: Order, performer: Performer, name: str, *, drop_overlong: bool, max_bad_rows: int | None
    ) -> None:
        """`max_bad_rows` None: a row that cannot be used is an error; `name`: its files, for messages."""
        self._order, self._performer, self._name = order, performer, name
        self._drop_overlong, self._max_bad_rows = drop_overlong, max_bad_rows
        #: rows left out over the whole run
        self.bad_rows = self.overlong = 0
        self.epoch = 0
        self._job = self._offset = 0
        self._bad_in_epoch = 0
        self._given_in_epoch = False
        self._rows: list[Drawn] | None = None
        self._begun: deque[tuple[int, int, Answer]] = deque()

    def next(self) -> PromptRow:
        """The next usable row.  Raises `DataError` for a row that the run does not leave out."""
        while True:
            if self._rows is None:
                self._rows = self._read()
            if self._offset == len(self._rows):
                self._turn()
                continue
            drawn = self._rows[self._offset]
            self._offset += 1
            if drawn.row is None:
                self._leave_out(drawn)
                continue
            self._given_in_epoch = True
            drawn.row.where = self._order.label(self.epoch, self._job, self._offset - 1, drawn)
            return drawn.row

    def state_dict(self) -> dict[str, Any]:
        """Where the next draw begins, and what was left out."""
        return {
            self._order.unit: self._order.size,
            "epoch": self.epoch,
            "position": self._order.position(self._job, self._offset),
            "bad_in_epoch": self._bad_in_epoch,
            "given_in_epoch": self._given_in_epoch,
            "bad_rows": self.bad_rows,
            "overlong": self.overlong,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw from there.  Raises `CheckpointError` where the place is in other files."""
        unit, size = self._order.unit, self._order.size
        if state.get(unit) != size:
            was = f"a file of {state[unit]} {unit}" if unit in state else "data that was read in another way"
            raise CheckpointError(
                f"the saved place is in {was}, but {self._name} has {size} {unit}."
                " Resume with the file the run was started with."
            )
        self.epoch = state["epoch"]
        self._job, self._offset = self._order.find(state["position"])
        self._bad_in_epoch, self._given_in_epoch = state["bad_in_epoch"], state["given_in_epoch"]
        self.bad_rows, self.overlong = state["bad_rows"], state["overlong"]
        self._rows = None
        self._begun.clear()

    def _read(self) -> list[Drawn]:
        """The rows of the job at hand, and later jobs begun."""
        if self._job >= self._order.jobs(self.epoch):
            return []  # a place right after the last row of an epoch
        if not self._begun:
            self._begin(self.epoch, self._job)
        while len(self._begun) <= self._performer.ahead:
            epoch, job, _ = self._begun[-1]
            later = job + 1 < self._order.jobs(epoch)
            self._begin(*((epoch, job + 1) if later else (epoch + 1, 0)))
        try:
            rows = self._begun[0][2]()
        except BaseException:
            self._begun.clear()  # whoever asks again gets this job, and not the next one
            raise
        self._begun.popleft()
        return rows

    def _begin(self, epoch: int, job: int) -> None:
        self._begun.append((epoch, job, self._performer.submit(self._order.job(epoch, job))))

    def _turn(self) -> None:
        """Go to the next job, or to the next epoch."""
        self._rows, self._offset = None, 0
        self._job += 1
        if self._job < self._order.jobs(self.epoch):
            return
        if not self._given_in_epoch:
            raise DataError(
                f"{self._name} has no row that can be used: {self._bad_in_epoch} rows of an epoch were bad, and all"
                " others over the limit of tokens"
            )
        self.epoch, self._job = self.epoch + 1, 0
        self._bad_in_epoch, self._given_in_epoch = 0, False

    def _leave_out(self, drawn: Drawn) -> None:
        if drawn.fault == "overlong":
            if not self._drop_overlong:
                raise DataError(f"{self._order.where(drawn)}{drawn.reason}")
            self.overlong += 1
            return
        self.bad_rows += 1
        self._bad_in_epoch += 1
        over = self._max_bad_rows is not None and self._bad_in_epoch > self._max_bad_rows
        if self._max_bad_rows is None or over or self.bad_rows <= _TOLD:
            message = f"{self._order.where(drawn)}{drawn.reason}"
            if self._max_bad_rows is None:
                raise DataError(message)
            if over:
                raise too_many(self._bad_in_epoch, self._max_bad_rows, message)
            logger.warning("left out: %s", message)
