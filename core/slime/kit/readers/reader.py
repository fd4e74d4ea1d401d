"""The interface of a file format, and the base class of formats whose rows are numbered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from slime.kit.readers.prompt_source import PromptSource
from slime.kit.readers.rows import Columns, PromptRow, RowError, check_row


@dataclass(frozen=True, slots=True)
class BadRow:
    """An unusable row."""

    #: what is wrong; continues a sentence that starts with the row's location
    reason: str


#: a row's position in its file, and the row
LocatedRow = tuple[int, PromptRow | BadRow]


class Reader(ABC):
    """One prompt file, or the slice of it that is used.

    A *position* is a number by which a reader finds a row again. A *block* is a piece of the file that is read at once;
    its size does not grow with the file. A reader can be pickled, and reopens its file in the other process.
    """

    def __init__(self, name: str, columns: Columns) -> None:
        """Initialize.

        Args:
            name: The file as the user wrote it, for messages.
            columns: The keys to read.
        """
        self.name = name
        self.columns = columns
        #: whether only the beginning of the file was unpacked
        self.incomplete = False

    @abstractmethod
    def cut(self, source: PromptSource) -> None:
        """Use only the rows of the source's slice. Raises `DataError` if the slice is empty."""

    @abstractmethod
    def scan(self) -> Iterator[tuple[int, int, PromptRow | BadRow]]:
        """Yield (position, line or row number, row) for every row, in constant memory."""

    @abstractmethod
    def label(self, number: int) -> str:
        """The location of a row, such as "FILE:LINE", from the line or row number that `scan` gave."""

    @abstractmethod
    def rows_at(self, positions: Sequence[int]) -> list[PromptRow | BadRow]:
        """The rows at these positions."""

    @property
    @abstractmethod
    def blocks(self) -> int:
        """Number of blocks."""

    @abstractmethod
    def block(self, number: int) -> list[LocatedRow]:
        """The rows of a block, in file order; a block may be empty."""

    def block_positions(self, number: int) -> Sequence[int]:
        """The positions of a block's rows, for formats that split large blocks into parts."""
        return [position for position, _ in self.block(number)]

    def parts(self, number: int) -> int:  # noqa: ARG002 - for formats whose blocks may be large
        """Number of parts in which a block is read."""
        return 1

    def where(self, position: int, *, exact: bool = True) -> str:  # noqa: ARG002 - for formats that must read the file
        """A row's location, such as "FILE:LINE".

        Args:
            position: The row's position.
            exact: Read the file up to the row, if that is needed to find the line.
        """
        return self.label(position)

    @abstractmethod
    def rows_about(self) -> tuple[int, bool]:
        """(number of rows, whether it is exact), without reading the whole file."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def checked(self, row: object) -> PromptRow | BadRow:
        """The row as slime uses it, or the reason why it is unusable."""
        try:
            return check_row(row, self.columns)
        except RowError as error:
            return BadRow(str(error))


#: rows of a block, and of a part of a larger one
ROWS = 1024


class Table(Reader):
    """A reader whose positions are row numbers, counted from 0."""

    def __init__(self, name: str, columns: Columns, rows: int) -> None:
        super().__init__(name, columns)
        self._first, self._after = 0, rows

    def cut(self, source: PromptSource) -> None:
        """Use only the rows of the slice. Raises `DataError` if it is empty."""
        self._first, self._after = source.bounds(self._after)

    @abstractmethod
    def values_at(self, numbers: Sequence[int]) -> list[dict[str, Any] | BadRow]:
        """Rows as dictionaries, or as `BadRow` if they cannot be read."""

    def rows_at(self, positions: Sequence[int]) -> list[PromptRow | BadRow]:
        """The rows with these numbers."""
        return [one if isinstance(one, BadRow) else self._row(one) for one in self.values_at(positions)]

    def scan(self) -> Iterator[tuple[int, int, PromptRow | BadRow]]:
        """Yield every row in file order."""
        for block in range(self.blocks):
            for number, row in self.block(block):
                yield number, number, row

    def label(self, number: int) -> str:
        """FILE and the row's number."""
        return f"{self.name}: row {number}"

    @property
    def blocks(self) -> int:
        """Blocks of `ROWS` rows."""
        return max(1, -(-(self._after - self._first) // ROWS))

    def block_positions(self, number: int) -> range:
        """The row numbers of the block."""
        first = self._first + number * ROWS
        return range(first, min(first + ROWS, self._after))

    def block(self, number: int) -> list[LocatedRow]:
        """The rows of the block."""
        numbers = self.block_positions(number)
        return list(zip(numbers, self.rows_at(numbers), strict=True))

    def rows_about(self) -> tuple[int, bool]:
        """The exact number of rows."""
        return self._after - self._first, True

    def _row(self, values: dict[str, Any]) -> PromptRow | BadRow:
        """Drop nulls first: a table stores null for a field that a message or schema does not have."""
        columns = self.columns
        prompt = values.get(columns.input_key)
        if isinstance(prompt, list):
            values[columns.input_key] = [_without_nulls(one, keep="content") for one in prompt]
        if columns.tool_key is not None and isinstance(tools := values.get(columns.tool_key), list):
            values[columns.tool_key] = [_without_nulls(one) for one in tools]
        if values.get(columns.metadata_key) is not None:
            try:
                # Checkpoints store metadata as JSON. Converting dates to text here keeps fresh and resumed runs alike.
                values[columns.metadata_key] = orjson.loads(orjson.dumps(values[columns.metadata_key]))
            except TypeError as error:
                return BadRow(f": {columns.metadata_key!r} cannot be stored as JSON: {error}")
        return self.checked(values)


def _without_nulls(value: Any, keep: str | None = None) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None or k == keep}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def rows_of(table: Any) -> list[dict[str, Any] | BadRow]:
    """The rows of an Arrow table or batch. Arrow does not validate UTF-8: rows with invalid text are bad."""
    try:
        rows: list[dict[str, Any] | BadRow] = table.to_pylist()
    except UnicodeDecodeError as error:
        if table.num_rows == 1:
            return [not_utf8(error)]
        return [row for number in range(table.num_rows) for row in rows_of(table.slice(number, 1))]
    return rows


def not_utf8(error: UnicodeDecodeError) -> BadRow:
    """A row with invalid text."""
    return BadRow(f": its text is not valid UTF-8: {error.reason} at byte {error.start}")


def wanted(names: Sequence[str], columns: Columns) -> list[str]:
    """The columns to read."""
    keys = [columns.input_key, columns.label_key, columns.metadata_key, columns.tool_key]
    return [name for name in names if name in keys]
