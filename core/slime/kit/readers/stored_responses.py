"""Files of responses that were stored by a run, or by any other program: one sample a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from slime.errors import DataError, json_type
from slime.kit.readers.keys import ABSENT, RowError, column_of, find, missing_key, no_column
from slime.kit.readers.opening import open_reader
from slime.kit.readers.prompt_source import parse_source
from slime.kit.readers.reader import BadRow
from slime.kit.readers.rows import Columns, PromptRow
from slime.types import Sample, Status


@dataclass(slots=True)
class StoredRow(PromptRow):
    """One stored response; its prompt may be empty, and its label may be missing."""

    response: str = ""
    #: the file, and its index in it
    file: str = ""
    number: int = 0
    #: all keys of the row
    entries: Mapping[str, Any] = field(default_factory=dict)
    #: whether it is of a run's own files, which have no metadata but the messages of a conversation
    of_run: bool = False

    def sample(self) -> Sample:
        """The sample, as it was when its reward was asked for. `response_tokens` stands for its tokens.

        One of a run is not trainable if generating it failed, so that no reward was asked for it.
        """
        entries, metadata = self.entries, self.metadata
        length, reason, reward = (entries.get(key) for key in ("response_tokens", "finish_reason", "reward"))
        status = Status.TRUNCATED if reason == "length" else Status.COMPLETED
        if self.of_run:
            stated, by_reward = entries.get("status"), str(entries.get("failure")).startswith("reward ")
            if stated in ("truncated", "aborted") or (stated == "failed" and not by_reward):
                status = Status(stated)
            if "messages" in entries:
                metadata = {**metadata, "messages": entries["messages"]}
            if isinstance(reward, dict):
                reward = None  # the sum of several rewards, none of which a generator gave
        return Sample(
            group_index=entries.get("group"),
            index=entries.get("index", self.number),
            prompt=self.prompt,
            response=self.response,
            response_length=length if isinstance(length, int) else 0,
            label=self.label,
            reward=reward,
            status=status,
            metadata=metadata,
            finish_reason=reason,
        )


@dataclass(frozen=True, slots=True)
class StoredColumns(Columns):
    """The keys of stored responses. Only the response must be there."""

    response_key: str = "response"
    #: the reward that the row expects; None: none
    expected_key: str | None = None
    #: whether the rows are a run's own
    of_run: bool = False

    def row(self, row: object) -> StoredRow:
        """The row as a stored response. Raises `RowError`."""
        if not isinstance(row, dict):
            raise RowError(f" is {json_type(row)}, expected an object like {{{self.response_key!r}: ...}}")
        for key, flag in self._required():
            if find(row, key) is ABSENT:
                raise missing_key(row, key, flag)
        response = find(row, self.response_key)
        if not isinstance(response, str):
            raise RowError(f": {self.response_key!r} is {json_type(response)}, expected the text of one response")
        # The prompt is shown to rewards as it was; a table of pairs has none, and need not have labels.
        label_key = self.label_key if find(row, self.label_key or "") not in (ABSENT, None) else None
        checked = Columns("prompt", label_key, self.metadata_key).row({**row, "prompt": "-"})
        prompt = find(row, self.input_key)
        return StoredRow(
            prompt=prompt if isinstance(prompt, str | list) else "",
            label=checked.label,
            metadata=checked.metadata,
            response=response,
            entries=row,
            of_run=self.of_run,
        )

    def used(self, row: Mapping[str, Any]) -> list[str]:
        """All columns of a row, and the keys inside them: see `StoredRow.entries`."""
        expected = () if self.expected_key is None else (self.expected_key,)
        return [*row, *Columns.used(self, row), self.response_key, *expected]

    def of_table(self, fields: Mapping[str, Any], table: str) -> list[str]:
        """All columns of a table: see `StoredRow.entries`. Raises `DataError` if it lacks the responses."""
        for key, flag in self._required():
            if column_of(fields, key) is None:
                raise no_column(fields, key, flag, table)
        return list(fields)

    def _required(self) -> Iterator[tuple[str, str]]:
        yield self.response_key, "--response-key"
        if self.expected_key is not None:
            yield self.expected_key, "--expected-key"


def stored_rows(path: str, columns: StoredColumns) -> Iterator[StoredRow]:
    """The rows of a file, in their order; `path` may end with a slice. Raises `DataError` with file and line."""
    with closing(open_reader(parse_source(path), columns, by_block=True)) as reader:
        for number, (position, row) in enumerate(reader.scan()):
            where = reader.where(position)
            if isinstance(row, BadRow):
                raise DataError(f"{where}{row.reason}")
            assert isinstance(row, StoredRow)
            row.where, row.file, row.number = where, path, number
            yield row
