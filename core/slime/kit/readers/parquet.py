"""Parquet files, read with pyarrow: unpacked for random access, or by row group for streams."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, BinaryIO

from slime.errors import DataError
from slime.kit.readers.keys import nested_fields
from slime.kit.readers.prompt_source import PromptSource
from slime.kit.readers.reader import ROWS, BadRow, TableReader, rows_of
from slime.kit.readers.rows import Columns
from slime.kit.readers.unpacked import Unpacked

#: most rows in a batch of an unpacked file
_BATCH = 16 * ROWS


class RowGroups(TableReader):
    """A Parquet file whose blocks are its row groups; one group is in memory at a time."""

    def __init__(self, name: str, path: str, columns: Columns) -> None:
        """Raises `DataError` if the file is not valid Parquet or lacks a column."""
        file = _open(name, path)
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        fields, self._names = _fields(file, columns, name)
        super().__init__(name, columns, sum(sizes), fields)
        self._path = path
        #: first row of each group, and the total number of rows
        self._begins = [0, *accumulate(sizes)]
        self._first_group, self._groups = 0, len(sizes)
        #: the group that was read last, and its number
        self._group: Any = None
        self._number = -1

    def __getstate__(self) -> dict[str, object]:
        return super().__getstate__() | {"_group": None, "_number": -1}

    def cut(self, source: PromptSource) -> None:
        """Use only the groups that overlap the slice."""
        super().cut(source)
        self._first_group = bisect_right(self._begins, self._first) - 1
        self._groups = bisect_right(self._begins, self._after - 1) - self._first_group

    @property
    def blocks(self) -> int:
        """Number of row groups."""
        return self._groups

    def positions(self, block: int) -> range:
        """The row numbers of a group."""
        group = self._first_group + block
        return range(max(self._first, self._begins[group]), min(self._after, self._begins[group + 1]))

    def values_at(self, numbers: Sequence[int]) -> list[dict[str, Any] | BadRow]:
        """Rows of one group as dictionaries."""
        if not numbers:
            return []
        number = bisect_right(self._begins, numbers[0]) - 1
        if number != self._number:
            self._group = None  # free the previous group first
            with _errors(self.name):
                if self._file is None:
                    self._file = _open(self.name, self._path)
                # To pyarrow a dot in a name is a path, so it reads more.
                group = self._file.read_row_group(number, columns=self._names, use_threads=False)
                self._group = group.select(self._names)
            self._number = number
        return rows_of(self._group.take([row - self._begins[number] for row in numbers]))


class ArrowRows(TableReader):
    """A memory-mapped Arrow file: random access without holding rows in memory."""

    def __init__(self, name: str, columns: Columns, rows: int, fields: Mapping[str, Any], unpacked: Unpacked) -> None:
        super().__init__(name, columns, rows, fields, unpacked)
        self._path = unpacked.path

    def values_at(self, numbers: Sequence[int]) -> list[dict[str, Any] | BadRow]:
        """Rows as dictionaries."""
        import pyarrow as pa

        if self._file is None:
            self._file = pa.ipc.open_file(pa.memory_map(self._path)).read_all()  # views of the mapped file, no copy
        return [row for number in numbers for row in rows_of(self._file.slice(number, 1))]


def unpack_parquet(name: str, path: str, columns: Columns) -> ArrowRows:
    """Unpack the needed columns of a Parquet file into a temporary Arrow file, for random access.

    Raises:
        DataError: The file is not valid Parquet or lacks a column.
    """
    import pyarrow as pa

    file = _open(name, path)
    fields, names = _fields(file, columns, name)

    def batches() -> Iterator[Any]:
        with _errors(name):  # errors here are about the Parquet file, not about space for the copy
            yield from file.iter_batches(batch_size=_BATCH, columns=names, use_threads=False)

    def write(target: BinaryIO) -> None:
        schema = pa.schema([file.schema_arrow.field(one) for one in names])
        with pa.ipc.new_file(target, schema) as out:
            for batch in batches():
                out.write_batch(batch.select(names))  # to pyarrow a dot in a name is a path, so it reads more

    return ArrowRows(name, columns, file.metadata.num_rows, fields, Unpacked(write, name))


def _open(name: str, path: str) -> Any:
    import pyarrow.parquet as pq

    with _errors(name):
        return pq.ParquetFile(path)


def _fields(file: Any, columns: Columns, name: str) -> tuple[dict[str, Any], list[str]]:
    """The fields of a file, and the columns to read. Raises `DataError` if one is missing, or is there twice."""
    fields = nested_fields(file.schema_arrow)
    wanted = columns.of_table(fields, name)
    twice = next((one for one in wanted if file.schema_arrow.names.count(one) > 1), None)
    if twice is not None:
        raise DataError(f"{name} has two columns {twice!r}: rename one")
    return fields, wanted


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Turn pyarrow's errors about a damaged file into `DataError`."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # damaged pages, damaged names of columns
        raise DataError(f"{name} is not a valid Parquet file: {' '.join(str(error).split())}") from None
