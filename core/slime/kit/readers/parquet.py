"""Parquet files, read with pyarrow: unpacked for random access, or by row group for streams."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, BinaryIO

from slime.errors import DataError
from slime.kit.readers.prompt_source import PromptSource
from slime.kit.readers.reader import ROWS, BadRow, Table, rows_of, wanted
from slime.kit.readers.rows import Columns, require_columns
from slime.kit.readers.unpacked import Unpacked

#: most rows in a batch of an unpacked file
_BATCH = 16 * ROWS


class RowGroups(Table):
    """A Parquet file whose blocks are its row groups; one group is in memory at a time."""

    def __init__(self, name: str, path: str, columns: Columns) -> None:
        """Raises `DataError` if the file is not valid Parquet or lacks a column."""
        import pyarrow.parquet as pq

        with _errors(name):
            file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        require_columns(names, columns, name)
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        super().__init__(name, columns, sum(sizes))
        self._path, self._wanted = path, wanted(names, columns)
        #: first row of each group, and the total number of rows
        self._begins = [0, *accumulate(sizes)]
        self._first_group, self._groups = 0, len(sizes)
        self._file: Any = None
        self._read: tuple[int, Any] = (-1, None)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_file": None, "_read": (-1, None)}

    def cut(self, source: PromptSource) -> None:
        """Use only the groups that overlap the slice."""
        super().cut(source)
        self._first_group = bisect_right(self._begins, self._first) - 1
        self._groups = bisect_right(self._begins, self._after - 1) - self._first_group

    @property
    def blocks(self) -> int:
        """Number of row groups."""
        return self._groups

    def parts(self, number: int) -> int:
        """A row group is read `ROWS` rows at a time."""
        return max(1, -(-len(self.block_positions(number)) // ROWS))

    def block_positions(self, number: int) -> range:
        """The row numbers of a group."""
        group = self._first_group + number
        return range(max(self._first, self._begins[group]), min(self._after, self._begins[group + 1]))

    def values_at(self, numbers: Sequence[int]) -> list[dict[str, Any] | BadRow]:
        """Rows as dictionaries; adjacent rows of one group are read together."""
        values: list[dict[str, Any] | BadRow] = []
        position = 0
        while position < len(numbers):
            group = bisect_right(self._begins, numbers[position]) - 1
            low, high = self._begins[group], self._begins[group + 1]
            end = position
            while end < len(numbers) and low <= numbers[end] < high:
                end += 1
            values += rows_of(self._group(group).take([number - low for number in numbers[position:end]]))
            position = end
        return values

    def close(self) -> None:
        """Close the file."""
        self._file, self._read = None, (-1, None)

    def _group(self, group: int) -> Any:
        import pyarrow.parquet as pq

        if self._read[0] != group:
            self._read = (-1, None)  # free the previous group first
            with _errors(self.name):
                if self._file is None:
                    self._file = pq.ParquetFile(self._path)
                self._read = (group, self._file.read_row_group(group, columns=self._wanted, use_threads=False))
        return self._read[1]


class ArrowRows(Table):
    """A memory-mapped Arrow file: random access without holding rows in memory."""

    def __init__(self, name: str, unpacked: Unpacked, columns: Columns, begins: Sequence[int]) -> None:
        """Initialize.

        Args:
            name: The file as the user wrote it.
            unpacked: The Arrow file.
            columns: The keys to read.
            begins: First row of each batch, and the total number of rows.
        """
        super().__init__(name, columns, begins[-1])
        self._unpacked: Unpacked | None = unpacked
        self._path, self._begins = unpacked.path, begins
        self._file: Any = None
        self._batches: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_file": None, "_batches": {}, "_unpacked": None}

    def values_at(self, numbers: Sequence[int]) -> list[dict[str, Any] | BadRow]:
        """Rows as dictionaries."""
        import pyarrow as pa

        if self._file is None:
            self._file = pa.ipc.open_file(pa.memory_map(self._path, "r"))
        values: list[dict[str, Any] | BadRow] = []
        for number in numbers:
            batch = bisect_right(self._begins, number) - 1
            if batch not in self._batches:
                self._batches[batch] = self._file.get_batch(batch)  # a view of the mapped file, no copy
            values += rows_of(self._batches[batch].slice(number - self._begins[batch], 1))
        return values

    def close(self) -> None:
        """Close the file and remove the unpacked copy."""
        self._file, self._batches = None, {}
        if self._unpacked is not None:
            self._unpacked.close()
            self._unpacked = None


def unpack_parquet(name: str, path: str, columns: Columns) -> ArrowRows:
    """Unpack the needed columns of a Parquet file into a temporary Arrow file, for random access.

    Raises:
        DataError: The file is not valid Parquet or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _errors(name):
        file = pq.ParquetFile(path)
    require_columns(file.schema_arrow.names, columns, name)
    names = wanted(file.schema_arrow.names, columns)
    begins = array("q", [0])

    def batches() -> Iterator[Any]:
        with _errors(name):  # errors here are about the Parquet file, not about space for the copy
            yield from file.iter_batches(batch_size=_BATCH, columns=names, use_threads=False)

    def write(target: BinaryIO) -> None:
        schema = pa.schema([file.schema_arrow.field(one) for one in names])
        with pa.ipc.new_file(target, schema) as out:
            for batch in batches():
                out.write_batch(batch)
                begins.append(begins[-1] + batch.num_rows)

    with _errors(name):
        unpacked = Unpacked(write, name)
    return ArrowRows(name, unpacked, columns, begins)


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Turn pyarrow's errors about a damaged file into `DataError`."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:  # damaged pages are an OSError
        raise DataError(f"{name} is not a valid Parquet file: {' '.join(str(error).split())}") from None
