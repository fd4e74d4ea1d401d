"""Jobs: read some rows, check them, tokenize them. Performed in the rollout process or in data workers."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slime.errors import DataError
from slime.kit.readers.reader import BadRow, Reader
from slime.kit.readers.rows import PromptRow
from slime.kit.readers.tokenize import PromptFormat, batch_backend, prompt_text, too_long


@dataclass(frozen=True, slots=True)
class RowsJob:
    """Read the rows at these positions, in this order."""

    files: array[int]  #: [rows] index of the file
    positions: array[int]  #: [rows] position in that file

    @classmethod
    def part(cls, file: int, positions: Sequence[int], part: int, parts: int) -> RowsJob:
        """Part `part` of `parts` equal parts of a file's rows."""
        begin, end = (len(positions) * number // parts for number in (part, part + 1))
        return cls(array("H", [file]) * (end - begin), array("q", positions[begin:end]))


@dataclass(frozen=True, slots=True)
class BlocksJob:
    """Read all rows of some blocks, shuffled together."""

    blocks: tuple[tuple[int, int], ...]  #: (file index, block index)
    shuffle: str | None = None  #: seed of the rows' order; None: file order


Job = RowsJob | BlocksJob


@dataclass(slots=True)
class LoadedRow:
    """A row that was read, and where."""

    file: int
    position: int
    row: PromptRow | BadRow

    def __reduce__(self) -> tuple[Any, ...]:  # see `PromptRow`
        return LoadedRow, (self.file, self.position, self.row)


#: waits for the rows of a submitted job, or reads them
AwaitedRows = Callable[[], list[LoadedRow]]


class Work:
    """Reads and tokenizes rows."""

    #: jobs to submit before they are needed: none, for they are performed when their rows are needed
    ahead = 0

    def __init__(
        self,
        readers: Sequence[Reader],
        tokenizer: Any,
        form: PromptFormat,
        max_tokens: int | None,
        *,
        locate: bool = False,
    ) -> None:
        """Initialize.

        Args:
            readers: The files.
            tokenizer: None: rows get no tokens.
            form: How a prompt is turned into text.
            max_tokens: Most tokens a prompt may have; None: no limit.
            locate: Set the place of each usable row, for messages: a data worker finds it in parallel.
        """
        self._locate = locate
        self.readers = readers
        self._tokenizer, self._form, self._max_tokens = tokenizer, form, max_tokens
        self._backend = None if tokenizer is None else batch_backend(tokenizer)

    def submit(self, job: Job) -> AwaitedRows:
        """A function that performs the job."""
        return partial(self.perform, job)

    def perform(self, job: Job) -> list[LoadedRow]:
        """The rows of a job, in its order. Raises `DataError` if a file has become unreadable."""
        loaded = self._rows(job) if isinstance(job, RowsJob) else self._blocks(job)
        if self._tokenizer is not None:
            self._tokenize(loaded)
        if self._locate:
            for one in loaded:
                if isinstance(one.row, PromptRow):
                    one.row.where = self.readers[one.file].where(one.position)
        return loaded

    def _rows(self, job: RowsJob) -> list[LoadedRow]:
        located = list(zip(job.files, job.positions, strict=True))
        rows = {
            file: iter(self.readers[file].rows_at([position for other, position in located if other == file]))
            for file in set(job.files)
        }
        return [LoadedRow(file, position, next(rows[file])) for file, position in located]

    def _blocks(self, job: BlocksJob) -> list[LoadedRow]:
        loaded = [
            LoadedRow(file, *located) for file, block in job.blocks for located in self.readers[file].block(block)
        ]
        if job.shuffle is not None:
            random.Random(job.shuffle).shuffle(loaded)
        return loaded

    def _tokenize(self, loaded: list[LoadedRow]) -> None:
        texts: list[str] = []
        rows: list[tuple[LoadedRow, PromptRow]] = []
        for one in loaded:
            if isinstance(one.row, BadRow):
                continue
            try:
                texts.append(prompt_text(self._tokenizer, one.row.prompt, one.row.tools, self._form))
                rows.append((one, one.row))
            except DataError as error:
                one.row = BadRow(f": {error}")
        for (one, row), text, ids in zip(rows, texts, self._encode(texts), strict=True):
            row.tokens = ids
            if not ids:
                one.row = BadRow(f": the prompt {text!r} has no tokens")
            elif self._max_tokens is not None and len(ids) > self._max_tokens:
                one.row = BadRow(too_long(len(ids), self._max_tokens), overlong=True)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if self._backend is None:
            return [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [one.ids for one in self._backend.encode_batch_fast(texts, add_special_tokens=False)]


def describe(job: Job, readers: Sequence[Reader]) -> str:
    """Which rows a job reads, for messages. May read the files up to there."""
    positions: dict[int, list[int]] = {}
    if isinstance(job, RowsJob):
        for file, position in zip(job.files, job.positions, strict=True):
            positions.setdefault(file, []).append(position)
    else:
        for file, block in job.blocks:
            positions.setdefault(file, []).extend(position for position, _ in readers[file].block(block))
    return "; ".join(
        f"{len(found)} rows from {readers[file].where(min(found))} to {readers[file].where(max(found))}"
        for file, found in sorted(positions.items())
        if found
    )
