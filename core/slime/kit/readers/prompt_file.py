"""A prompt file as a sequence of rows: all rows are checked on opening, and read on access."""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from slime.errors import DataError
from slime.kit.readers.opening import open_reader
from slime.kit.readers.prompt_source import PromptSource, parse_source
from slime.kit.readers.reader import BadRow, Reader
from slime.kit.readers.rows import Columns, PromptRow

__all__ = ["PromptFile", "PromptRow"]

logger = logging.getLogger(__name__)
#: number of unusable rows that are logged one by one
LOGGED = 10


class PromptFile:
    """A prompt file of any format as a sequence of its usable rows.

    Opening it reads the whole file once and checks every row. After that only the positions of the rows are kept
    (16 bytes each), and a row is read when it is accessed.
    """

    def __init__(
        self,
        path: str | Path | PromptSource,
        *,
        input_key: str,
        label_key: str | None,
        metadata_key: str = "metadata",
        tool_key: str | None = None,
        bad_rows: Literal["stop", "skip"] = "stop",
        max_bad_rows: int = 0,
    ) -> None:
        """Open and check a file. Empty lines are skipped.

        Args:
            path: The file, optionally with a slice: `data.jsonl@[0:100]`.
            input_key: Key of the prompt.
            label_key: Key of the label; None if rows have no label.
            metadata_key: Key of the metadata.
            tool_key: Key of the tool schemas; None if rows have no tools.
            bad_rows: "stop" raises at the first unusable row, "skip" leaves out up to `max_bad_rows`.
            max_bad_rows: How many rows may be left out.

        Raises:
            DataError: The file is missing, unreadable or empty, or a row is unusable. The message has file and line.
        """
        self.source = path if isinstance(path, PromptSource) else parse_source(str(path))
        #: number of rows left out
        self.bad_rows = 0
        self._positions, self._numbers = array("q"), array("q")
        self.reader: Reader = open_reader(self.source, Columns(input_key, label_key, metadata_key, tool_key))
        try:
            for position, number, row in self.reader.scan():
                if isinstance(row, BadRow):
                    self.bad_rows += 1
                    message = f"{self.reader.label(number)}{row.reason}"
                    if bad_rows == "stop" or self.bad_rows > max_bad_rows:
                        raise bad_row_error(message, self.bad_rows, None if bad_rows == "stop" else max_bad_rows)
                    if self.bad_rows <= LOGGED:
                        logger.warning("left out: %s", message)
                else:
                    self._positions.append(position)
                    self._numbers.append(number)
            if not self._positions:
                left_out = f" that can be used, and {self.bad_rows} that cannot" if self.bad_rows else ""
                raise DataError(f"{self.source} has no rows{left_out}, expected one JSON object per line")
        except BaseException:
            self.reader.close()
            raise

    @property
    def path(self) -> str:
        """The file as the user wrote it, without its slice."""
        return self.source.path

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, number: int) -> PromptRow:
        """Usable row `number`, counted from 0."""
        [row] = self.reader.rows_at([self._positions[number]])
        where = self.reader.label(self._numbers[number])
        if isinstance(row, BadRow):
            raise DataError(f"{where}{row.reason} (the file has changed since it was opened)")
        row.where = where
        return row

    def __iter__(self) -> Iterator[PromptRow]:
        return (self[number] for number in range(len(self)))

    def position(self, number: int) -> int:
        """The reader's position of row `number`."""
        return self._positions[number]

    def where(self, position: int) -> str:
        """The location of the row at a position, such as "FILE:LINE"."""
        return self.reader.label(self._numbers[bisect_left(self._positions, position)])

    def close(self) -> None:
        """Close the file."""
        self.reader.close()


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
