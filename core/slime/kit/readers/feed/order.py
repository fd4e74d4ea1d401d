"""The order of rows: a function of the seed and the epoch alone."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from slime.kit.readers.feed.work import BlocksJob, Job, RowsJob
from slime.kit.readers.reader import Reader

#: rows per job
CHUNK = 256
#: jobs' worth of rows per job of a data worker. In this process a job stops everything else, so it is small; handing
#: one to a worker costs some of this process's time, as much as a few hundred short rows
FOR_WORKERS = 4
#: number of blocks whose rows are shuffled together
WINDOW = 16


class Numbering:
    """Numbers the rows or blocks of some files, and shuffles the numbers for each epoch."""

    def __init__(self, sizes: Sequence[int], part: range, seed: str | None) -> None:
        """Initialize.

        Args:
            sizes: The number of rows or blocks of each of the run's files.
            part: The files to use.
            seed: Seed of the shuffle; None: file order.
        """
        self._part, self._seed = part, seed
        #: for each file, the number of rows or blocks in it and in all files before it
        self._ends = list(accumulate(sizes[file] for file in part))
        #: a saved position is valid only for files of the same size
        self.size = self._ends[-1]
        # Two epochs: jobs of the next epoch start before this epoch is finished.
        self._numbers = lru_cache(maxsize=2)(self._permuted)

    def _permuted(self, epoch: int) -> Sequence[int]:
        """The numbers in the order of an epoch."""
        if self._seed is None:
            return range(self.size)
        numbers = array("q", range(self.size))
        random.Random(f"{self._seed}/{epoch}").shuffle(numbers)
        return numbers

    def _locate(self, number: int) -> tuple[int, int]:
        """The file in which a row or block lies, and its index in that file."""
        file = bisect_right(self._ends, number)
        return self._part[file], number - (self._ends[file - 1] if file else 0)


class RowOrder(Numbering):
    """All rows of files that were checked, in file order or reshuffled each epoch."""

    #: unit of `size`
    unit = "rows"

    def __init__(
        self, positions: Sequence[Sequence[int]], part: range, seed: str | None, *, workers: bool = False
    ) -> None:
        """Initialize.

        Args:
            positions: The rows' positions in each of the run's files.
            part: The files to use.
            seed: Seed of the shuffle; None: file order.
            workers: Whether data workers perform the jobs.
        """
        super().__init__([len(rows) for rows in positions], part, seed)
        self._positions = positions
        self._chunk = CHUNK * (FOR_WORKERS if workers else 1)

    def jobs(self, epoch: int) -> int:  # noqa: ARG002 - the same in every epoch
        """Number of jobs in an epoch."""
        return -(-self.size // self._chunk)

    def job(self, epoch: int, number: int) -> Job:
        """Job `number` of an epoch."""
        files, positions = array("H"), array("q")
        for row in self._numbers(epoch)[number * self._chunk : (number + 1) * self._chunk]:
            file, index = self._locate(row)
            files.append(file)
            positions.append(self._positions[file][index])
        return RowsJob(files, positions)

    def position(self, job: int, offset: int) -> int:
        """The position `offset` rows into a job, as checkpoints save it."""
        return job * self._chunk + offset

    def find(self, position: int) -> tuple[int, int]:
        """The job and the offset of a position."""
        return divmod(position, self._chunk)


class BlockOrder(Numbering):
    """All blocks of some files: in file order, or shuffled, with the rows of a few blocks shuffled together.

    Memory: 8 bytes per block and a few numbers per window, however large the files are.
    """

    #: unit of `size`
    unit = "blocks"

    def __init__(self, readers: Sequence[Reader], part: range, seed: str | None) -> None:
        """Initialize.

        Args:
            readers: The run's files.
            part: The files to use.
            seed: Seed of the shuffle; None: file order.
        """
        super().__init__([reader.blocks for reader in readers], part, seed)
        self._readers = readers
        self._windows = lru_cache(maxsize=2)(self._planned)
        self._rows = lru_cache(maxsize=1)(self._permuted_rows)

    def jobs(self, epoch: int) -> int:
        """Number of jobs in an epoch."""
        return len(self._windows(epoch))

    def job(self, epoch: int, number: int) -> Job:
        """Job `number` of an epoch: a few blocks, or a part of the rows of one large block."""
        begin, end, part, parts = self._windows(epoch)[number]
        seed = None if self._seed is None else f"{self._seed}/{epoch}/{begin}"
        blocks = [self._locate(block) for block in self._numbers(epoch)[begin:end]]
        if parts == 1:
            return BlocksJob(tuple(blocks), seed)
        [(file, block)] = blocks
        return RowsJob.part(file, self._rows(file, block, seed), part, parts)

    def position(self, job: int, offset: int) -> list[int]:
        """The position `offset` rows into a job, as checkpoints save it."""
        return [job, offset]

    def find(self, position: Sequence[int]) -> tuple[int, int]:
        """The job and the offset of a position."""
        job, offset = position
        return job, offset

    def _planned(self, epoch: int) -> list[tuple[int, int, int, int]]:
        """The windows of an epoch in its order of blocks: (begin, end, part, parts)."""
        parts = [self._readers[file].parts(block) for file, block in map(self._locate, self._numbers(epoch))]
        windows = []
        begin = 0
        while begin < self.size:
            end = begin + 1
            while parts[begin] == 1 and end < min(self.size, begin + WINDOW) and parts[end] == 1:
                end += 1
            windows += [(begin, end, part, parts[begin]) for part in range(parts[begin])]
            begin = end
        return windows

    def _permuted_rows(self, file: int, block: int, seed: str | None) -> Sequence[int]:
        """The positions of a large block's rows."""
        positions = array("q", self._readers[file].positions(block) or ())
        if seed is not None:
            random.Random(seed).shuffle(positions)
        return positions


Order = RowOrder | BlockOrder
