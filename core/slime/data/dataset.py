"""A prompt file as a sequence of rows: every row checked when it is opened, read when it is asked for."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from slime.data.prompt_source import PromptSource, parse_source
from slime.data.readers.opening import open_reader
from slime.data.readers.reader import BadRow, Reader
from slime.data.rows import Columns, PromptRow
from slime.errors import DataError

__all__ = ["PromptFile", "PromptRow"]

logger = logging.getLogger(__name__)
#: bad rows of a file that are told one by one
_TOLD = 10


class PromptFile:
    """A prompt file of any format as a sequence of its usable rows.

    Opening reads the whole file once and checks every row; afterwards only the rows' places are kept
    (16 bytes each) and a row is read when it is asked for.
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
        """Open and check `path`, which may end with a slice.  `label_key` None: rows carry no label.

        bad_rows   what to do about rows that cannot be used: raise for the first, or leave out up to `max_bad_rows`

        Raises `DataError`, with file and line, for a file that is missing, unreadable or without rows, a line
        that is no JSON object, a missing key and a value of the wrong type.  Empty lines are skipped.
        """
        self.source = path if isinstance(path, PromptSource) else parse_source(str(path))
        #: rows that were left out
        self.bad_rows = 0
        self._places, self._numbers = array("q"), array("q")
        self.reader: Reader = open_reader(self.source, Columns(input_key, label_key, metadata_key, tool_key))
        try:
            for place, number, row in self.reader.scan():
                if isinstance(row, BadRow):
                    self._leave_out(number, row, budget=max_bad_rows if bad_rows == "skip" else None)
                else:
                    self._places.append(place)
                    self._numbers.append(number)
            if not self._places:
                left_out = f" that can be used, and {self.bad_rows} that cannot" if self.bad_rows else ""
                raise DataError(f"{self.source} has no rows{left_out}, expected one JSON object per line")
        except BaseException:
            self.reader.close()
            raise

    @property
    def path(self) -> str:
        """The file as stated, without its slice."""
        return self.source.path

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> PromptRow:
        """Usable row `number`, counted from 0."""
        [row] = self.reader.rows_at([self._places[number]])
        if isinstance(row, BadRow):
            raise DataError(f"{self.where(number)}{row.reason} (the file has changed since it was opened)")
        row.where = self.where(number)
        return row

    def __iter__(self) -> Iterator[PromptRow]:
        return (self[number] for number in range(len(self)))

    def places(self, numbers: Iterable[int]) -> array[int]:
        """Where the reader finds rows."""
        return array("q", map(self._places.__getitem__, numbers))

    def where(self, number: int) -> str:
        """ "FILE:LINE" of row `number`."""
        return self.reader.label(self._numbers[number])

    def close(self) -> None:
        """Close the file."""
        self.reader.close()

    def _leave_out(self, number: int, row: BadRow, budget: int | None) -> None:
        message = f"{self.reader.label(number)}{row.reason}"
        if budget is None:
            raise DataError(message)
        self.bad_rows += 1
        if self.bad_rows <= _TOLD:
            logger.warning("left out: %s", message)
        if self.bad_rows > budget:
            raise too_many(self.bad_rows, budget, message)


def too_many(bad: int, budget: int, latest: str) -> DataError:
    """The error that ends a pass over the data in which too many rows were left out."""
    return DataError(
        f"{bad} rows cannot be used, and --max-bad-rows is {budget}. The latest: {latest}. Mend the file, or raise"
        " --max-bad-rows"
    )
