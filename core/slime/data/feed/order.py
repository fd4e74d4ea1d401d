"""Which rows come when: a function of the seed and the epoch alone."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from slime.data.dataset import PromptFile
from slime.data.feed.work import BlocksJob, Drawn, Job, RowsJob
from slime.data.readers.reader import Reader

#: rows of a job
CHUNK = 256
#: blocks that are shuffled together
WINDOW = 16


class Order(ABC):
    """The rows of some files as a sequence of jobs, another one for each epoch."""

    #: what `size` counts
    unit: str
    #: by which a saved place is known to be of the same files
    size: int

    @abstractmethod
    def jobs(self, epoch: int) -> int:
        """How many jobs make the epoch."""

    @abstractmethod
    def job(self, epoch: int, number: int) -> Job:
        """Job `number` of the epoch."""

    @abstractmethod
    def position(self, job: int, offset: int) -> Any:
        """The place `offset` rows into a job, JSON-ready."""

    @abstractmethod
    def find(self, position: Any) -> tuple[int, int]:
        """The job and the offset of a place."""

    @abstractmethod
    def label(self, epoch: int, job: int, offset: int, drawn: Drawn) -> str:
        """Where a row stands, quickly."""

    @abstractmethod
    def where(self, drawn: Drawn) -> str:
        """ "FILE:LINE"; may read the file up to there."""


class RowOrder(Order):
    """All rows of the files, which have been checked: as they stand, or shuffled anew each epoch."""

    unit = "rows"

    def __init__(self, files: Sequence[PromptFile], first: int, seed: str | None) -> None:
        """`first`: number of the first file among those of the run; `seed` None: as they stand."""
        self._files, self._first, self._seed = files, first, seed
        self._ends = list(accumulate(len(file) for file in files))
        self.size = self._ends[-1]
        self._orders: dict[int, Sequence[int]] = {}

    def jobs(self, epoch: int) -> int:  # noqa: ARG002 - the same in every epoch
        return -(-self.size // CHUNK)

    def job(self, epoch: int, number: int) -> RowsJob:
        rows = self._order(epoch)[number * CHUNK : (number + 1) * CHUNK]
        if len(self._files) == 1:
            return RowsJob(array("H", [self._first]) * len(rows), self._files[0].places(rows))
        files, places = array("H"), array("q")
        for row in rows:
            file, local = self._locate(row)
            files.append(self._first + file)
            places.extend(self._files[file].places([local]))
        return RowsJob(files, places)

    def position(self, job: int, offset: int) -> int:
        return job * CHUNK + offset

    def find(self, position: int) -> tuple[int, int]:
        return divmod(position, CHUNK)

    def label(self, epoch: int, job: int, offset: int, drawn: Drawn) -> str:  # noqa: ARG002 - other orders need it
        file, local = self._locate(self._order(epoch)[job * CHUNK + offset])
        return self._files[file].where(local)

    def where(self, drawn: Drawn) -> str:
        return self._files[drawn.file - self._first].reader.where(drawn.place)

    def _locate(self, row: int) -> tuple[int, int]:
        file = bisect_right(self._ends, row)
        return file, row - (self._ends[file - 1] if file else 0)

    def _order(self, epoch: int) -> Sequence[int]:
        """Row numbers in the order of the epoch."""
        if self._seed is None:
            return range(self.size)
        if epoch not in self._orders:
            # Two are kept: jobs of the next epoch are begun before this one is done.
            self._orders = {kept: order for kept, order in self._orders.items() if kept >= epoch - 1}
            order = array("q", range(self.size))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._orders[epoch] = order
        return self._orders[epoch]


class BlockOrder(Order):
    """The blocks of the files in their order, or in a shuffled one with the rows of a few blocks shuffled together.

    Memory: 8 bytes a block and a few numbers a window, whatever the files hold.
    """

    unit = "blocks"

    def __init__(self, readers: Sequence[Reader], first: int, seed: str | None) -> None:
        """`first`: number of the first file among those of the run; `seed` None: as they stand."""
        self._readers, self._first, self._seed = readers, first, seed
        self._ends = list(accumulate(reader.blocks for reader in readers))
        self.size = self._ends[-1]
        self._plans: dict[int, tuple[Sequence[int], list[tuple[int, int, int, int]]]] = {}

    def jobs(self, epoch: int) -> int:
        return len(self._plan(epoch)[1])

    def job(self, epoch: int, number: int) -> BlocksJob:
        order, windows = self._plan(epoch)
        begin, end, part, parts = windows[number]
        blocks = []
        for block in order[begin:end]:
            file = bisect_right(self._ends, block)
            blocks.append((self._first + file, block - (self._ends[file - 1] if file else 0)))
        shuffle = None if self._seed is None else f"{self._seed}/{epoch}/{begin}"
        return BlocksJob(tuple(blocks), shuffle, part, parts)

    def position(self, job: int, offset: int) -> list[int]:
        return [job, offset]

    def find(self, position: Sequence[int]) -> tuple[int, int]:
        job, offset = position
        return job, offset

    def label(self, epoch: int, job: int, offset: int, drawn: Drawn) -> str:  # noqa: ARG002 - other orders need it
        return self._readers[drawn.file - self._first].quick_label(drawn.place)

    def where(self, drawn: Drawn) -> str:
        return self._readers[drawn.file - self._first].where(drawn.place)

    def _plan(self, epoch: int) -> tuple[Sequence[int], list[tuple[int, int, int, int]]]:
        """The epoch's blocks, and its windows: (first, after the last, part, parts) in that sequence."""
        if epoch not in self._plans:
            self._plans = {kept: plan for kept, plan in self._plans.items() if kept >= epoch - 1}
            order: Sequence[int] = range(self.size)
            if self._seed is not None:
                order = array("q", order)
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._plans[epoch] = (order, self._windows(order))
        return self._plans[epoch]

    def _windows(self, order: Sequence[int]) -> list[tuple[int, int, int, int]]:
        windows = []
        begin = 0
        while begin < len(order):
            end = begin + 1
            if (parts := self._parts(order[begin])) > 1:
                windows += [(begin, end, part, parts) for part in range(parts)]
            else:
                while end < len(order) and end - begin < WINDOW and self._parts(order[end]) == 1:
                    end += 1
                windows.append((begin, end, 0, 1))
            begin = end
        return windows

    def _parts(self, block: int) -> int:
        file = bisect_right(self._ends, block)
        return self._readers[file].parts(block - (self._ends[file - 1] if file else 0))
