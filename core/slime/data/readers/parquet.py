"""Parquet files, read with pyarrow: for the run's own order unpacked, for a stream by the row group."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, BinaryIO

from slime.data.prompt_source import PromptSource
from slime.data.readers.reader import BadRow, Placed
from slime.data.readers.tables import ROWS, Table, rows_of, wanted
from slime.data.readers.unpacked import Unpacked
from slime.data.rows import Columns, require_columns
from slime.errors import DataError

#: rows of a batch of an unpacked file
_BATCH = 16 * ROWS


class RowGroups(Table):
    """A Parquet file whose blocks are its row groups: one of them is in memory at a time."""

    def __init__(self, name: str, path: str, columns: Columns) -> None:
        """Raises `DataError` for what is no Parquet file, and for one without the columns."""
        import pyarrow.parquet as pq

        with _errors(name):
            file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        require_columns(names, columns, name)
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        super().__init__(name, columns, sum(sizes))
        self._path, self._wanted = path, wanted(names, columns)
        #: the first row of each group, and the number after the last
        self._begins = [0, *accumulate(sizes)]
        self._first_group, self._groups = 0, len(sizes)
        self._file: Any = None
        self._read: tuple[int, Any] = (-1, None)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_file": None, "_read": (-1, None)}

    def cut(self, source: PromptSource) -> None:
        """Use the groups that have rows of the slice."""
        super().cut(source)
        self._first_group = bisect_right(self._begins, self._first) - 1
        self._groups = bisect_right(self._begins, self._after - 1) - self._first_group

    @property
    def blocks(self) -> int:
        """Row groups."""
        return self._groups

    def parts(self, number: int) -> int:
        """A row group is handled `ROWS` rows at a time."""
        low, high = self._range(number)
        return max(1, -(-(high - low) // ROWS))

    def block_places(self, number: int) -> range:
        """The numbers of a group's rows."""
        return range(*self._range(number))

    def block(self, number: int) -> list[Placed]:
        """The rows of a group."""
        numbers = self.block_places(number)
        return list(zip(numbers, self.rows_at(numbers), strict=True))

    def block_range(self, first: int, last: int) -> str:
        """FILE with the rows of the groups."""
        return f"{self.name}, rows {self._range(first)[0]} to {self._range(last)[1] - 1}"

    def values_at(self, numbers: Sequence[int]) -> list[dict[str, Any] | BadRow]:
        """Rows as dictionaries; neighbours of one group together."""
        values: list[dict[str, Any] | BadRow] = []
        place = 0
        while place < len(numbers):
            group = bisect_right(self._begins, numbers[place]) - 1
            low, high = self._begins[group], self._begins[group + 1]
            end = place
            while end < len(numbers) and low <= numbers[end] < high:
                end += 1
            values += rows_of(self._group(group).take([number - low for number in numbers[place:end]]))
            place = end
        return values

    def close(self) -> None:
        """Close the file."""
        self._file, self._read = None, (-1, None)

    def _range(self, number: int) -> tuple[int, int]:
        group = self._first_group + number
        return max(self._first, self._begins[group]), min(self._after, self._begins[group + 1])

    def _group(self, group: int) -> Any:
        import pyarrow.parquet as pq

        if self._read[0] != group:
            self._read = (-1, None)  # the one before makes room first
            with _errors(self.name):
                if self._file is None:
                    self._file = pq.ParquetFile(self._path)
                self._read = (group, self._file.read_row_group(group, columns=self._wanted, use_threads=False))
        return self._read[1]


class ArrowRows(Table):
    """An Arrow file that is mapped into memory: any row at any time, and no memory of its own."""

    def __init__(self, name: str, unpacked: Unpacked, columns: Columns, rows: int, per_batch: int) -> None:
        super().__init__(name, columns, rows)
        self._unpacked: Unpacked | None = unpacked
        self._path, self._per_batch = unpacked.path, per_batch
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
            batch, row = divmod(number, self._per_batch)
            if batch not in self._batches:
                self._batches[batch] = self._file.get_batch(batch)  # names what is mapped, copies nothing
            values += rows_of(self._batches[batch].slice(row, 1))
        return values

    def close(self) -> None:
        """What was unpacked is gone."""
        self._file, self._batches = None, {}
        if self._unpacked is not None:
            self._unpacked.close()
            self._unpacked = None


def unpack_parquet(name: str, path: str, columns: Columns) -> ArrowRows:
    """A Parquet file for reading in any order: its columns that are used, in a temporary file.

    Raises `DataError` for what is no Parquet file, and for one without the columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _errors(name):
        file = pq.ParquetFile(path)
    require_columns(file.schema_arrow.names, columns, name)
    names = wanted(file.schema_arrow.names, columns)
    rows = 0

    def batches() -> Iterator[Any]:
        with _errors(name):  # what pyarrow raises here is about the file, and not about the room for what is unpacked
            yield from file.iter_batches(batch_size=ROWS, columns=names, use_threads=False)

    def write(target: BinaryIO) -> None:
        nonlocal rows
        schema = pa.schema([file.schema_arrow.field(one) for one in names])
        with pa.ipc.new_file(target, schema) as out:
            pending: list[Any] = []
            held = 0
            for batch in batches():
                pending.append(batch)
                held += batch.num_rows
                rows += batch.num_rows
                while held >= _BATCH:
                    # Batches end with their row group; rows are found by division, so all but the last are as long.
                    table = pa.Table.from_batches(pending).combine_chunks()
                    out.write_table(table.slice(0, _BATCH))
                    rest = table.slice(_BATCH)
                    pending, held = rest.to_batches(), rest.num_rows
            if held:
                out.write_table(pa.Table.from_batches(pending).combine_chunks())

    with _errors(name):
        unpacked = Unpacked(write, name)
    return ArrowRows(name, unpacked, columns, rows, _BATCH)


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """What pyarrow says of a damaged file, as `DataError`."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:  # damaged pages are an OSError
        raise DataError(f"{name} is no Parquet file that can be read: {' '.join(str(error).split())}") from None
