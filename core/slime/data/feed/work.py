"""The unit of work of the data: read some rows, check them, tokenise them.  The same in every process."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slime.data.readers.reader import BadRow, Reader
from slime.data.rows import PromptRow
from slime.data.tokenize import BatchEncoder, PromptFormat, prompt_text, too_long
from slime.errors import DataError


@dataclass(frozen=True, slots=True)
class RowsJob:
    """Rows anywhere in the files, in the order in which they are wanted."""

    files: array[int]  #: [rows] number of the file
    places: array[int]  #: [rows] place in it


@dataclass(frozen=True, slots=True)
class BlocksJob:
    """The rows of some blocks, shuffled together."""

    blocks: tuple[tuple[int, int], ...]  #: (number of the file, of the block)
    shuffle: str | None = None  #: seed of the rows' order; None: as they stand
    #: of all rows, the part number `part` of `parts`
    part: int = 0
    parts: int = 1


Job = RowsJob | BlocksJob


@dataclass(slots=True)
class Drawn:
    """A row that was read."""

    file: int
    place: int
    #: None where the row is left out
    row: PromptRow | None
    #: why it is left out
    fault: Literal["", "bad", "overlong"] = ""
    reason: str = ""


class Work:
    """Reads and tokenises."""

    def __init__(self, readers: Sequence[Reader], tokenizer: Any, form: PromptFormat, max_tokens: int | None) -> None:
        """`tokenizer` None: rows stay without tokens; `max_tokens` None: prompts of any length."""
        self._readers = readers
        self._encode = None if tokenizer is None else BatchEncoder(tokenizer)
        self._form, self._max_tokens = form, max_tokens

    def perform(self, job: Job) -> list[Drawn]:
        """The job's rows in its order.  Raises `DataError` for a file that cannot be read any more."""
        drawn = self._rows(job) if isinstance(job, RowsJob) else self._blocks(job)
        if self._encode is not None:
            self._tokenize(drawn, self._encode)
        return drawn

    def _rows(self, job: RowsJob) -> list[Drawn]:
        if len(self._readers) == 1:
            return [
                _drawn(0, place, row)
                for place, row in zip(job.places, self._readers[0].rows_at(job.places), strict=True)
            ]
        drawn: list[Drawn | None] = [None] * len(job.places)
        for file in sorted(set(job.files)):
            wanted = [i for i, one in enumerate(job.files) if one == file]
            rows = self._readers[file].rows_at([job.places[i] for i in wanted])
            for i, row in zip(wanted, rows, strict=True):
                drawn[i] = _drawn(file, job.places[i], row)
        return [one for one in drawn if one is not None]

    def _blocks(self, job: BlocksJob) -> list[Drawn]:
        if job.parts > 1:
            return self._part(job)
        rows = [(file, *placed) for file, block in job.blocks for placed in self._readers[file].block(block)]
        if job.shuffle is not None:
            random.Random(job.shuffle).shuffle(rows)
        return [_drawn(*one) for one in rows]

    def _part(self, job: BlocksJob) -> list[Drawn]:
        """Of a large block only the rows that are wanted become objects."""
        [(file, block)] = job.blocks
        places = list(self._readers[file].block_places(block))
        if job.shuffle is not None:
            random.Random(job.shuffle).shuffle(places)
        part = places[len(places) * job.part // job.parts : len(places) * (job.part + 1) // job.parts]
        return [_drawn(file, *one) for one in zip(part, self._readers[file].rows_at(part), strict=True)]

    def _tokenize(self, drawn: list[Drawn], encode: BatchEncoder) -> None:
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
    """Which files and lines a job reads, for messages.  May read the files up to there."""
    parts = []
    if isinstance(job, RowsJob):
        for file in sorted(set(job.files)):
            places = [place for one, place in zip(job.files, job.places, strict=True) if one == file]
            ends = [readers[file].where(place) for place in (min(places), max(places))]
            parts.append(f"{len(places)} rows from {ends[0]} to {ends[1]}")
    else:
        for file in sorted({file for file, _ in job.blocks}):
            blocks = sorted(block for one, block in job.blocks if one == file)
            few = blocks if blocks[-1] - blocks[0] >= len(blocks) else [blocks[0]]
            last = blocks[-1]
            parts += [readers[file].block_range(one, one if len(few) > 1 else last) for one in few[:4]]
            if len(few) > 4:
                parts.append(f"{len(few) - 4} blocks more of {readers[file].name}")
    return "; ".join(parts)


def _drawn(file: int, place: int, row: PromptRow | BadRow) -> Drawn:
    return Drawn(file, place, None, "bad", row.reason) if isinstance(row, BadRow) else Drawn(file, place, row)


def _leave_out(one: Drawn, fault: Literal["bad", "overlong"], reason: str) -> None:
    one.row, one.fault, one.reason = None, fault, reason
