"""What every format can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slime.data.prompt_source import PromptSource
from slime.data.rows import Columns, PromptRow, RowError, check_row


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used."""

    #: what is wrong with it, the rest of a sentence that begins with its place
    reason: str


#: a row's place in its file, with the row
Placed = tuple[int, PromptRow | BadRow]


class Reader(ABC):
    """One prompt file, cut to the part of it that is used.

    It pickles, and opens its file anew in the process that it arrives in.  A *place* is a number that finds a row
    again; a *block* is a piece of the file that is read at once, of a size that does not grow with the file.
    """

    def __init__(self, name: str, columns: Columns) -> None:
        """`name`: the file as stated, for messages."""
        self.name = name
        self.columns = columns
        #: whether the file holds more than was unpacked of it
        self.incomplete = False

    @abstractmethod
    def cut(self, source: PromptSource) -> None:
        """Use the rows of the source's slice only.  Raises `DataError` where that leaves none."""

    @abstractmethod
    def scan(self) -> Iterator[tuple[int, int, PromptRow | BadRow]]:
        """Every row in its order, in constant memory: its place, its number for people, the row."""

    @abstractmethod
    def label(self, number: int) -> str:
        """ "FILE:LINE" of a number for people."""

    @abstractmethod
    def rows_at(self, places: Sequence[int]) -> list[PromptRow | BadRow]:
        """The rows at these places."""

    @property
    @abstractmethod
    def blocks(self) -> int:
        """How many blocks it has."""

    @abstractmethod
    def block(self, number: int) -> list[Placed]:
        """The rows of a block, in their order; a block may have none."""

    def block_places(self, number: int) -> Sequence[int]:
        """The places of a block's rows, for formats whose blocks have parts."""
        return [place for place, _ in self.block(number)]

    def parts(self, number: int) -> int:  # noqa: ARG002 - for formats whose blocks may be large
        """Pieces in which a block's rows are handled."""
        return 1

    @abstractmethod
    def where(self, place: int) -> str:
        """ "FILE:LINE" of a row.  May read the file up to there."""

    @abstractmethod
    def quick_label(self, place: int) -> str:
        """Where a row is, without reading for it."""

    @abstractmethod
    def block_range(self, first: int, last: int) -> str:
        """What the blocks `first` to `last` cover, for messages."""

    @abstractmethod
    def rows_about(self) -> tuple[int, bool]:
        """(rows, whether that is exact), without reading the file whole."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file."""

    def checked(self, row: object) -> PromptRow | BadRow:
        """The row as slime uses it, or what is wrong with it."""
        try:
            return check_row(row, self.columns)
        except RowError as error:
            return BadRow(str(error))
