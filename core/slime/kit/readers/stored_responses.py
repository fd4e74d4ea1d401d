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
from slime.kit.readers.rows import Columns, PromptRow, check_row
from slime.types import Sample, Status


@dataclass(slots=True)
class StoredRow(PromptRow):
    """One stored response; its prompt may be empty, and its label may be missing."""

    response: str = ""
    #: its index in the file
    number: int = 0
    #: all keys of the row
    entries: Mapping[str, Any] = field(default_factory=dict)

    def sample(self) -> Sample:
        """The sample, as it was when its reward was asked for.

        Responses are trainable unless their row's `status` says that generating them failed. `response_tokens` is their
        length, if the row has it; the tokens themselves are not stored.
        """
        entries = self.entries
        failure = entries.get("failure")
        status = Status.TRUNCATED if entries.get("finish_reason") == "length" else Status.COMPLETED
        stated = entries.get("status")
        if stated == Status.ABORTED.value or (stated == Status.FAILED.value and not _by_reward(failure)):
            status = Status(stated)
        elif stated == Status.TRUNCATED.value:
            status = Status.TRUNCATED
        metadata = self.metadata
        if "messages" in entries:
            metadata = {**metadata, "messages": entries["messages"]}
        length = entries.get("response_tokens")
        return Sample(
            group_index=entries.get("group"),
            index=entries.get("index", self.number),
            prompt=self.prompt,
            response=self.response,
            response_length=length if isinstance(length, int) else 0,
            label=self.label,
            reward=entries.get("reward"),
            status=status,
            metadata=metadata,
            finish_reason=entries.get("finish_reason"),
        )


def _by_reward(failure: object) -> bool:
    return isinstance(failure, str) and failure.startswith("reward ")


@dataclass(frozen=True, slots=True)
class StoredColumns(Columns):
    """The keys of stored responses. Only the response must be there."""

    response_key: str = "response"
    #: the reward that the row expects; None: none
    expected_key: str | None = None

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
        # `check_row` wants a prompt and a label, which a table of pairs need not have.
        stated = {key: find(row, key) for key in (self.input_key, self.label_key) if key is not None}
        has = {key for key, value in stated.items() if value is not ABSENT and value is not None and value != ""}
        prompt = {} if self.input_key in has else {self.input_key: "-"}
        label_key = self.label_key if self.label_key in has else None
        checked = check_row({**row, **prompt}, Columns(self.input_key, label_key, self.metadata_key))
        return StoredRow(
            prompt="" if prompt else checked.prompt,
            label=checked.label,
            metadata=checked.metadata,
            response=response,
            entries=row,
        )

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
            row.where, row.number = where, number
            yield row
