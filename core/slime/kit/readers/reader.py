"""The interface of a file format, and the base class of formats whose rows are numbered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.kit.readers.keys import ABSENT, RowError, column_of, find, paths
from slime.kit.readers.prompt_source import PromptSource
from slime.kit.readers.rows import Columns, PromptRow
from slime.kit.readers.table_values import has_short_floats, json_value, shortest, without_nulls
from slime.kit.readers.unpacked import Unpacked

#: rows of a block of a table, and of a part of a larger block
ROWS = 1024


@dataclass(frozen=True, slots=True)
class BadRow:
    """An unusable row."""

    #: what is wrong; continues a sentence that starts with the row's location
    reason: str
    #: whether the only fault is that the prompt has too many tokens
    overlong: bool = False


#: a row's position in its file, and the row
LocatedRow = tuple[int, PromptRow | BadRow]


class Reader(ABC):
    """One prompt file, or the slice of it that is used.

    A *position* is a number by which a reader finds a row again. A *block* is a piece of the file that is read at once;
    its size does not grow with the file. A reader can be pickled, and reopens its file in the other process.
    """

    def __init__(self, name: str, columns: Columns, unpacked: Unpacked | None = None) -> None:
        """Initialize.

        Args:
            name: The file as the user wrote it, for messages.
            columns: The keys to read.
            unpacked: A temporary file that is read instead, and removed by `close`.
        """
        self.name = name
        self.columns = columns
        #: whether only the beginning of the file was unpacked
        self.incomplete = False
        self._unpacked = unpacked
        #: what was opened on first use
        self._file: Any = None

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_file": None, "_unpacked": None}

    @abstractmethod
    def cut(self, source: PromptSource) -> None:
        """Use only the rows of the source's slice. Raises `DataError` if the slice is empty."""

    @abstractmethod
    def rows_at(self, positions: Sequence[int]) -> list[PromptRow | BadRow]:
        """The rows at these positions."""

    @property
    def rows(self) -> int | None:
        """Number of rows; None if the file must be read to count them."""
        return None

    @property
    @abstractmethod
    def blocks(self) -> int:
        """Number of blocks."""

    @abstractmethod
    def block(self, number: int) -> list[LocatedRow]:
        """The rows of a block, in file order; a block may be empty."""

    def positions(self, block: int) -> range | None:  # noqa: ARG002 - for formats that know them
        """The positions of a block's rows; None if the block must be read to find them."""
        return None

    def parts(self, block: int) -> int:
        """Number of parts in which a block is read."""
        return -(-len(self.positions(block) or (0,)) // ROWS)

    def scan(self) -> Iterator[LocatedRow]:
        """Yield every row in file order, in constant memory."""
        for number in range(self.blocks):
            yield from self.block(number)

    @abstractmethod
    def where(self, position: int, *, exact: bool = True) -> str:
        """A row's location, such as "FILE:LINE".

        Args:
            position: The row's position.
            exact: Read the file up to the row, if that is needed to find the line.
        """

    def close(self) -> None:
        """Close the file and remove the unpacked copy."""
        self._file = None
        if self._unpacked is not None:
            self._unpacked.close()
            self._unpacked = None

    @abstractmethod
    def names(self) -> list[str]:
        """The keys of the rows, also those inside their objects, for messages."""

    @abstractmethod
    def may_have(self, key: str) -> bool:
        """Whether a row may have a key. False is certain: the whole file was looked at."""

    def checked(self, row: object) -> PromptRow | BadRow:
        """The row as slime uses it, or the reason why it is unusable."""
        try:
            return self.columns.row(row)
        except RowError as error:
            return BadRow(str(error))


class TableReader(Reader):
    """A reader whose positions are row numbers, counted from 0."""

    def __init__(
        self, name: str, columns: Columns, rows: int, fields: Mapping[str, Any], unpacked: Unpacked | None = None
    ) -> None:
        super().__init__(name, columns, unpacked)
        self._first, self._after = 0, rows
        self._fields = fields

    def names(self) -> list[str]:
        """The columns, and the fields inside them."""
        return paths(self._fields)

    def may_have(self, key: str) -> bool:
        """Whether there is such a column, or a field inside one."""
        return column_of(self._fields, key) is not None

    def cut(self, source: PromptSource) -> None:
        """Use only the rows of the slice. Raises `DataError` if it is empty."""
        self._first, self._after = source.bounds(self._after)

    @abstractmethod
    def values_at(self, numbers: Sequence[int]) -> list[dict[str, Any] | BadRow]:
        """Rows as dictionaries, or as `BadRow` if they cannot be read."""

    def rows_at(self, positions: Sequence[int]) -> list[PromptRow | BadRow]:
        """The rows with these numbers."""
        values = self.values_at(positions)
        return [one if isinstance(one, BadRow) else self._row(one) for one in values]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._after - self._first

    @property
    def blocks(self) -> int:
        """Blocks of `ROWS` rows."""
        return max(1, -(-self.rows // ROWS))

    def positions(self, block: int) -> range:
        """The row numbers of a block."""
        first = self._first + block * ROWS
        return range(first, min(first + ROWS, self._after))

    def block(self, number: int) -> list[LocatedRow]:
        """The rows of a block."""
        numbers = self.positions(number)
        return list(zip(numbers, self.rows_at(numbers), strict=True))

    def where(self, position: int, *, exact: bool = True) -> str:  # noqa: ARG002 - always exact
        """FILE and the row's number."""
        return f"{self.name}: row {position}"

    def _row(self, values: dict[str, Any]) -> PromptRow | BadRow:
        """A row as a file of JSON would have it."""
        columns = self.columns
        row = dict(values)
        # What is beside a used field in the same column may be anything.
        for key in columns.used(values):
            if (found := find(values, key)) is ABSENT:
                continue
            try:
                row[key] = json_value(found)
            except TypeError as error:
                if key == columns.metadata_key:
                    return BadRow(f": {key!r} cannot be stored as JSON: {error}")
                row[key] = found
        # A table stores null for a field that a message or schema does not have.
        for name, keep in ((columns.input_key, "content"), (columns.tool_key, None)):
            if name is not None and isinstance(found := find(row, name), list):
                row[name] = without_nulls(found, keep)
        return self.checked(row)


def rows_of(table: Any) -> list[dict[str, Any] | BadRow]:
    """The rows of an Arrow table or batch.

    Arrow validates neither UTF-8 nor dates, such as those beyond the year 9999: rows that Python cannot hold are bad.
    """
    try:
        rows: list[dict[str, Any] | BadRow] = table.to_pylist()
    except (ValueError, OverflowError) as error:
        if table.num_rows == 1:
            return [unreadable(error)]
        return [row for number in range(table.num_rows) for row in rows_of(table.slice(number, 1))]
    for field in table.schema:
        if has_short_floats(field.type):
            for row in rows:
                assert isinstance(row, dict)
                row[field.name] = shortest(row[field.name], field.type)
    return rows


def unreadable(error: Exception) -> BadRow:
    """A row with a value that Python cannot hold, such as invalid text."""
    if isinstance(error, UnicodeDecodeError):
        return BadRow(f": its text is not valid UTF-8: {error.reason} at byte {error.start}")
    return BadRow(f": it has a value that cannot be read: {' '.join(str(error).split())}")
