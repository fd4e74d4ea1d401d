"""The prompts of a run one after the other, epoch after epoch, with a place to come back to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from slime.data.dataset import PromptFile
from slime.data.feed.feed import FeedOptions, PromptFeed
from slime.data.rows import Columns, PromptRow
from slime.errors import DataError


class PromptDataset:
    """What a data source of one's own draws from.

    In the files' order, or in one that depends on the seed and the epoch alone.  The files are opened, and checked,
    when they are first needed; `DataError` tells what is wrong with them.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str],
        *,
        input_key: str = "prompt",
        label_key: str | None = "label",
        metadata_key: str = "metadata",
        shuffle_seed: int | None = None,
        options: FeedOptions | None = None,
        tokenizer: Any = None,
    ) -> None:
        """`path`: one file or several, as --prompt-data names them.

        `label_key` None: rows carry no label; `shuffle_seed` None: in the files' order.  `options` stands for all of
        them; with `tokenizer`, rows have tokens.
        """
        self.paths = [str(path)] if isinstance(path, str | Path) else list(path)
        self._options = options or FeedOptions(Columns(input_key, label_key, metadata_key), shuffle_seed=shuffle_seed)
        self._tokenizer = tokenizer
        self._latest: dict[int, PromptRow] = {}

    def __len__(self) -> int:
        return sum(len(file) for file in self._files())

    def __getitem__(self, number: int) -> PromptRow:
        """Row `number` of the files; drawing goes on where it was."""
        for file in self._files():
            if number < len(file):
                return file[number]
            number -= len(file)
        raise IndexError(f"{', '.join(self.paths)}: no row {number}")

    def rows(self, n: int) -> list[PromptRow]:
        """The next `n` rows; after the last row comes the first of the next epoch."""
        drawn = [self._feed.next() for _ in range(n)]
        self._latest = {id(row.prompt): row for row in drawn}
        return drawn

    def sample(self, n: int) -> list[str | list[dict[str, Any]]]:
        """The prompts of the next `n` rows."""
        return [row.prompt for row in self.rows(n)]

    def row_of(self, prompt: object) -> PromptRow | None:
        """The row of the latest draw that this very prompt is of; None for any other object."""
        return self._latest.get(id(prompt))

    def state_dict(self) -> dict[str, Any]:
        """Where the next draw begins."""
        return self._feed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw from there.  Raises `CheckpointError` when the place is in other files."""
        self._feed.load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        """`data/...`: see `PromptFeed.metrics`."""
        return self._feed.metrics()

    def close(self) -> None:
        """End what reads ahead, and close the files."""
        if "_feed" in self.__dict__:
            self._feed.close()

    @cached_property
    def _feed(self) -> PromptFeed:
        return PromptFeed(self.paths, self._options, self._tokenizer)

    def _files(self) -> Sequence[PromptFile]:
        if self._options.streaming:
            raise DataError("a stream has no rows by number: --streaming-data draws them in its own order")
        return self._feed.files
