"""The order of rows: a function of the seed and the epoch alone."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from slime.kit.readers.feed.work import BlocksJob, Job, LoadedRow, RowsJob
from slime.kit.readers.prompt_file import PromptFile
from slime.kit.readers.reader import Reader

#: rows per job
CHUNK = 256
#: number of blocks whose rows are shuffled together
WINDOW = 16


class Order(ABC):
    """The rows of some files as a sequence of jobs, reordered in each epoch."""

    #: unit of `size`: "rows" or "blocks"
    unit: str
    #: a saved position is valid only for files of the same size
    size: int

    @abstractmethod
    def jobs(self, epoch: int) -> int:
        """Number of jobs in an epoch."""

    @abstractmethod
    def job(self, epoch: int, number: int) -> Job:
        """Job `number` of an epoch."""

    @abstractmethod
    def position(self, job: int, offset: int) -> Any:
        """The position `offset` rows into a job, JSON-ready."""

    @abstractmethod
    def find(self, position: Any) -> tuple[int, int]:
        """The job and the offset of a position."""

    @abstractmethod
    def where(self, row: LoadedRow, *, exact: bool) -> str:
        """A row's location; with `exact` always "FILE:LINE", for which the file may be read up to that row."""


class RowOrder(Order):
    """All rows of the (already checked) files, in file order or reshuffled each epoch."""

    unit = "rows"

    def __init__(self, files: Sequence[PromptFile], first: int, seed: str | None) -> None:
        """Initialize.

        Args:
            files: The files.
            first: Index of the first of them among the run's files.
            seed: Seed of the shuffle; None: file order.
        """
        self._files, self._first, self._seed = files, first, seed
        self._ends = list(accumulate(len(file) for file in files))
        self.size = self._ends[-1]
        # Two epochs: jobs of the next epoch start before this epoch is finished.
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def jobs(self, epoch: int) -> int:  # noqa: ARG002 - the same in every epoch
        return -(-self.size // CHUNK)

    def job(self, epoch: int, number: int) -> RowsJob:
        files, positions = array("H"), array("q")
        for row in self._order(epoch)[number * CHUNK : (number + 1) * CHUNK]:
            file, local = _locate(self._ends, row)
            files.append(self._first + file)
            positions.append(self._files[file].position(local))
        return RowsJob(files, positions)

    def position(self, job: int, offset: int) -> int:
        return job * CHUNK + offset

    def find(self, position: int) -> tuple[int, int]:
        return divmod(position, CHUNK)

    def where(self, row: LoadedRow, *, exact: bool) -> str:  # noqa: ARG002 - always exact
        return self._files[row.file - self._first].where(row.position)

    def _shuffled(self, epoch: int) -> Sequence[int]:
        """Row numbers in the order of the epoch."""
        return _permutation(self.size, self._seed, epoch)


class BlockOrder(Order):
    """All blocks of the files: in file order, or shuffled, with the rows of a few blocks shuffled together.

    Memory: 8 bytes per block and a few numbers per window, however large the files are.
    """

    unit = "blocks"

    def __init__(self, readers: Sequence[Reader], first: int, seed: str | None) -> None:
        """Initialize.

        Args:
            readers: The files.
            first: Index of the first of them among the run's files.
            seed: Seed of the shuffle; None: file order.
        """
        self._readers, self._first, self._seed = readers, first, seed
        self._ends = list(accumulate(reader.blocks for reader in readers))
        self.size = self._ends[-1]
        self._plan = lru_cache(maxsize=2)(self._make_plan)

    def jobs(self, epoch: int) -> int:
        return len(self._plan(epoch)[1])

    def job(self, epoch: int, number: int) -> BlocksJob:
        order, windows = self._plan(epoch)
        begin, end, part, parts = windows[number]
        blocks = []
        for block in order[begin:end]:
            file, local = _locate(self._ends, block)
            blocks.append((self._first + file, local))
        shuffle = None if self._seed is None else f"{self._seed}/{epoch}/{begin}"
        return BlocksJob(tuple(blocks), shuffle, part, parts)

    def position(self, job: int, offset: int) -> list[int]:
        return [job, offset]

    def find(self, position: Sequence[int]) -> tuple[int, int]:
        job, offset = position
        return job, offset

    def where(self, row: LoadedRow, *, exact: bool) -> str:
        return self._readers[row.file - self._first].where(row.position, exact=exact)

    def _make_plan(self, epoch: int) -> tuple[Sequence[int], list[tuple[int, int, int, int]]]:
        """The order of an epoch's blocks, and its windows in that order: (begin, end, part, parts)."""
        order = _permutation(self.size, self._seed, epoch)
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
        return order, windows

    def _parts(self, block: int) -> int:
        file, local = _locate(self._ends, block)
        return self._readers[file].parts(local)


def _permutation(size: int, seed: str | None, epoch: int) -> Sequence[int]:
    """The numbers below `size`, shuffled for the epoch; in order without a seed."""
    if seed is None:
        return range(size)
    order = array("q", range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def _locate(ends: Sequence[int], number: int) -> tuple[int, int]:
    """The file in which a row or block of all files lies, and its number in that file.

    Args:
        ends: For each file, the number of rows or blocks in it and in all files before it.
        number: Number among the rows or blocks of all files.
    """
    file = bisect_right(ends, number)
    return file, number - (ends[file - 1] if file else 0)
