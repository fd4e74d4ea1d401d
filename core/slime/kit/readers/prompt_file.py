"""A prompt file as a sequence of rows: all rows are checked on opening, and read on access."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from pathlib import Path

from slime.errors import DataError
from slime.kit.readers.opening import open_reader
from slime.kit.readers.prompt_source import PromptSource, parse_source
from slime.kit.readers.reader import BadRow, Reader
from slime.kit.readers.rows import Columns, PromptRow

logger = logging.getLogger(__name__)
#: number of unusable rows that are logged one by one
LOGGED = 10


class PromptFile:
    """A prompt file of any format as a sequence of its usable rows.

    Opening it reads the whole file once and checks every row. After that it keeps only the positions of the rows
    (8 bytes each), and reads a row when it is accessed.
    """

    def __init__(
        self,
        path: str | Path | PromptSource,
        *,
        input_key: str,
        label_key: str | None,
        metadata_key: str = "metadata",
        tool_key: str | None = None,
        max_bad_rows: int | None = None,
    ) -> None:
        """Open and check a file. Empty lines are skipped.

        Args:
            path: The file, optionally with a slice: `data.jsonl@[0:100]`.
            input_key: Key of the prompt.
            label_key: Key of the label; None if rows have no label.
            metadata_key: Key of the metadata.
            tool_key: Key of the tool schemas; None if rows have no tools.
            max_bad_rows: Number of unusable rows to leave out; None: the first one raises.

        Raises:
            DataError: The file is missing, unreadable or empty, or a row is unusable. The message has file and line.
        """
        source = path if isinstance(path, PromptSource) else parse_source(str(path))
        #: number of rows left out
        self.bad_rows = 0
        #: the reader's positions of the usable rows
        self.positions = array("q")
        self.reader = open_reader(source, Columns(input_key, label_key, metadata_key, tool_key))
        try:
            for position, row in self.reader.scan():
                if not isinstance(row, BadRow):
                    self.positions.append(position)
                    continue
                self.bad_rows += 1
                leave_out(self.reader, position, row, self.bad_rows, max_bad_rows, log=self.bad_rows <= LOGGED)
            if not self.positions:
                left_out = f" that can be used, and {self.bad_rows} that cannot" if self.bad_rows else ""
                raise DataError(f"{source} has no rows{left_out}, expected one JSON object per line")
        except BaseException:
            self.reader.close()
            raise

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, number: int) -> PromptRow:
        """Usable row `number`, counted from 0."""
        position = self.positions[number]
        [row] = self.reader.rows_at([position])
        where = self.reader.where(position)
        if isinstance(row, BadRow):
            raise DataError(f"{where}{row.reason} (the file has changed since it was opened)")
        row.where = where
        return row

    def __iter__(self) -> Iterator[PromptRow]:
        return (self[number] for number in range(len(self)))

    def close(self) -> None:
        """Close the file."""
        self.reader.close()


def leave_out(reader: Reader, position: int, row: BadRow, count: int, limit: int | None, *, log: bool) -> None:
    """Leave an unusable row out.

    Args:
        reader: Its file.
        position: Its position in the file.
        row: What is wrong with it.
        count: Number of unusable rows, including this one.
        limit: `--max-bad-rows`; None: no row may be left out.
        log: Whether to log it.

    Raises:
        DataError: It may not be left out.
    """
    refused = limit is None or count > limit
    if refused or log:  # to find a row's line takes time
        message = f"{reader.where(position)}{row.reason}"
        if refused:
            raise bad_row_error(message, count, limit)
        logger.warning("left out: %s", message)


def bad_row_error(reason: str, count: int, limit: int | None) -> DataError:
    """The error for an unusable row that may not be left out.

    Args:
        reason: Where the row is, and what is wrong with it.
        count: Number of unusable rows, including this one.
        limit: `--max-bad-rows`; None: no row may be left out.
    """
    if limit is None:
        return DataError(reason)
    return DataError(
        f"{count} rows cannot be used, and --max-bad-rows is {limit}. The latest: {reason}. Fix the file, or raise"
        " --max-bad-rows"
    )
