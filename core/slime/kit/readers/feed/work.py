"""Jobs: read some rows, check them, tokenize them. Performed in the rollout process or in data workers."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slime.errors import DataError
from slime.kit.readers.reader import BadRow, Reader
from slime.kit.readers.rows import PromptRow
from slime.kit.readers.tokenize import BatchEncoder, PromptFormat, prompt_text, too_long


@dataclass(frozen=True, slots=True)
class RowsJob:
    """Read the rows at these positions, in this order."""

    files: array[int]  #: [rows] index of the file
    positions: array[int]  #: [rows] position in that file


@dataclass(frozen=True, slots=True)
class BlocksJob:
    """Read all rows of some blocks, shuffled together."""

    blocks: tuple[tuple[int, int], ...]  #: (file index, block index)
    shuffle: str | None = None  #: seed of the rows' order; None: file order
    #: only part `part` of `parts` of the rows
    part: int = 0
    parts: int = 1


Job = RowsJob | BlocksJob


@dataclass(slots=True)
class LoadedRow:
    """A row that was read, or the reason why it is left out."""

    file: int
    position: int
    #: None if the row is left out
    row: PromptRow | None
    #: why it is left out
    fault: Literal["", "bad", "overlong"] = ""
    reason: str = ""


class Work:
    """Reads and tokenizes rows."""

    def __init__(self, readers: Sequence[Reader], tokenizer: Any, form: PromptFormat, max_tokens: int | None) -> None:
        """Initialize.

        Args:
            readers: The files.
            tokenizer: None: rows get no tokens.
            form: How a prompt is turned into text.
            max_tokens: Most tokens a prompt may have; None: no limit.
        """
        self._readers = readers
        self._encode = None if tokenizer is None else BatchEncoder(tokenizer)
        self._form, self._max_tokens = form, max_tokens

    def perform(self, job: Job) -> list[LoadedRow]:
        """The rows of a job, in its order. Raises `DataError` if a file has become unreadable."""
        drawn = self._rows(job) if isinstance(job, RowsJob) else self._blocks(job)
        if self._encode is not None:
            self._tokenize(drawn, self._encode)
        return drawn

    def _rows(self, job: RowsJob) -> list[LoadedRow]:
        drawn: list[LoadedRow | None] = [None] * len(job.positions)
        for file in sorted(set(job.files)):
            wanted = [i for i, one in enumerate(job.files) if one == file]
            rows = self._readers[file].rows_at([job.positions[i] for i in wanted])
            for i, row in zip(wanted, rows, strict=True):
                drawn[i] = _drawn(file, job.positions[i], row)
        return [one for one in drawn if one is not None]

    def _blocks(self, job: BlocksJob) -> list[LoadedRow]:
        if job.parts > 1:
            return self._part(job)
        rows = [(file, *located) for file, block in job.blocks for located in self._readers[file].block(block)]
        if job.shuffle is not None:
            random.Random(job.shuffle).shuffle(rows)
        return [_drawn(*one) for one in rows]

    def _part(self, job: BlocksJob) -> list[LoadedRow]:
        """The rows of one part of a large block; the other parts are not decoded."""
        [(file, block)] = job.blocks
        positions = list(self._readers[file].block_positions(block))
        if job.shuffle is not None:
            random.Random(job.shuffle).shuffle(positions)
        part = positions[len(positions) * job.part // job.parts : len(positions) * (job.part + 1) // job.parts]
        return [_drawn(file, *one) for one in zip(part, self._readers[file].rows_at(part), strict=True)]

    def _tokenize(self, drawn: list[LoadedRow], encode: BatchEncoder) -> None:
        texts, asked = [], []
        for one in drawn:
            if one.row is None:
                continue
            try:
                texts.append(prompt_text(encode.tokenizer, one.row.prompt, one.row.tools, self._form))
                asked.append(one)
            except DataError as error:
                _leave_out(one, "bad", f": {error}")
        for one, text, ids in zip(asked, texts, encode(texts), strict=True):
            row = one.row
            assert row is not None
            if not ids:
                _leave_out(one, "bad", f": the prompt {text!r} has no tokens")
            elif self._max_tokens is not None and len(ids) > self._max_tokens:
                _leave_out(one, "overlong", too_long(len(ids), self._max_tokens))
            else:
                row.tokens = ids


def describe(job: Job, readers: Sequence[Reader]) -> str:
    """Which rows a job reads, for messages. May read the files up to there."""
    positions: dict[int, list[int]] = {}
    if isinstance(job, RowsJob):
        for file, position in zip(job.files, job.positions, strict=True):
            positions.setdefault(file, []).append(position)
    else:
        for file, block in job.blocks:
            positions.setdefault(file, []).extend(readers[file].block_positions(block))
    return "; ".join(
        f"{len(found)} rows from {readers[file].where(min(found))} to {readers[file].where(max(found))}"
        for file, found in sorted(positions.items())
        if found
    )


def _drawn(file: int, position: int, row: PromptRow | BadRow) -> LoadedRow:
    return (
        LoadedRow(file, position, None, "bad", row.reason)
        if isinstance(row, BadRow)
        else LoadedRow(file, position, row)
    )


def _leave_out(one: LoadedRow, fault: Literal["bad", "overlong"], reason: str) -> None:
    one.row, one.fault, one.reason = None, fault, reason
