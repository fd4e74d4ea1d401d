"""Tables: rows that are found by their number."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from slime.data.prompt_source import PromptSource
from slime.data.readers.reader import BadRow, Placed, Reader
from slime.data.rows import Columns, PromptRow

#: rows of a block, and of a part of a larger one
ROWS = 1024


class Table(Reader):
    """A reader whose places are the numbers of its rows, counted from 0."""

    def __init__(self, name: str, columns: Columns, rows: int) -> None:
        super().__init__(name, columns)
        self._first, self._after = 0, rows

    def cut(self, source: PromptSource) -> None:
        """Use the rows of its slice only.  Raises `DataError`."""
        self._first, self._after = source.bounds(self._after)

    @abstractmethod
    def values_at(self, numbers: Sequence[int]) -> list[dict[str, Any] | BadRow]:
        """Rows as dictionaries, and those that cannot become any."""

    def rows_at(self, places: Sequence[int]) -> list[PromptRow | BadRow]:
        """The rows of these numbers."""
        return [one if isinstance(one, BadRow) else self._row(one) for one in self.values_at(places)]

    def scan(self) -> Iterator[tuple[int, int, PromptRow | BadRow]]:
        """Every row in its order."""
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

    def block(self, number: int) -> list[Placed]:
        """The rows of the block."""
        first = self._first + number * ROWS
        numbers = range(first, min(first + ROWS, self._after))
        return list(zip(numbers, self.rows_at(numbers), strict=True))

    def where(self, place: int) -> str:
        """FILE and the row's number."""
        return self.label(place)

    def quick_label(self, place: int) -> str:
        """FILE and the row's number."""
        return self.label(place)

    def block_range(self, first: int, last: int) -> str:
        """FILE with the rows of the blocks."""
        low, high = self._first + first * ROWS, min(self._first + (last + 1) * ROWS, self._after)
        return f"{self.name}, rows {low} to {high - 1}"

    def rows_about(self) -> tuple[int, bool]:
        """Tables know it."""
        return self._after - self._first, True

    def _row(self, values: dict[str, Any]) -> PromptRow | BadRow:
        """Null is what a table has for a field that a message or a schema does not have."""
        columns = self.columns
        prompt = values.get(columns.input_key)
        if isinstance(prompt, list):
            values[columns.input_key] = [_without_nulls(one, keep="content") for one in prompt]
        if columns.tool_key is not None and isinstance(tools := values.get(columns.tool_key), list):
            values[columns.tool_key] = [_without_nulls(one) for one in tools]
        if values.get(columns.metadata_key) is not None:
            try:
                # A checkpoint holds it as JSON: dates become text here and not only there.
                values[columns.metadata_key] = orjson.loads(orjson.dumps(values[columns.metadata_key]))
            except TypeError as error:
                return BadRow(f": {columns.metadata_key!r} has no form in JSON: {error}")
        return self.checked(values)


def _without_nulls(value: Any, keep: str | None = None) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None or k == keep}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def rows_of(table: Any) -> list[dict[str, Any] | BadRow]:
    """The rows of an Arrow table or batch.  Arrow does not look whether texts are UTF-8: rows with others are bad."""
    try:
        rows: list[dict[str, Any] | BadRow] = table.to_pylist()
    except UnicodeDecodeError as error:
        if table.num_rows == 1:
            return [not_utf8(error)]
        return [row for number in range(table.num_rows) for row in rows_of(table.slice(number, 1))]
    return rows


def not_utf8(error: UnicodeDecodeError) -> BadRow:
    """A row with such a text."""
    return BadRow(f": a text in it is not UTF-8: {error.reason} at byte {error.start}")


def wanted(names: Sequence[str], columns: Columns) -> list[str]:
    """The columns of a table that are read."""
    keys = [columns.input_key, columns.label_key, columns.metadata_key, columns.tool_key]
    return [name for name in names if name in keys]
