"""The prompts of a file one after the other, epoch after epoch, with a place to come back to."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from slime.data.dataset import PromptFile, PromptRow
from slime.errors import CheckpointError


class PromptDataset:
    """What a data source of one's own draws from.

    In the file's order, or in one that depends on `shuffle_seed` and the epoch alone.  The file is opened, and checked,
    when it is first needed; `DataError` tells what is wrong with it.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        input_key: str,
        label_key: str | None,
        metadata_key: str = "metadata",
        shuffle_seed: int | None = None,
    ) -> None:
        """`label_key` None: rows carry no label; `shuffle_seed` None: in the file's order."""
        self.path = Path(path)
        self._keys = {"input_key": input_key, "label_key": label_key, "metadata_key": metadata_key}
        self._shuffle_seed = shuffle_seed
        self._epoch, self._position = 0, 0
        self._latest: dict[int, PromptRow] = {}

    def __len__(self) -> int:
        return len(self._file)

    def __getitem__(self, number: int) -> PromptRow:
        """Row `number` of the file; drawing goes on where it was."""
        return self._file[number]

    def rows(self, n: int) -> list[PromptRow]:
        """The next `n` rows; after the last row comes the first of the next epoch."""
        drawn = [self._next() for _ in range(n)]
        self._latest = {id(row.prompt): row for row in drawn}
        return drawn

    def sample(self, n: int) -> list[str | list[dict[str, Any]]]:
        """The prompts of the next `n` rows."""
        return [row.prompt for row in self.rows(n)]

    def row_of(self, prompt: object) -> PromptRow | None:
        """The row of the latest draw that this very prompt is of; None for any other object."""
        return self._latest.get(id(prompt))

    def state_dict(self) -> dict[str, int]:
        """Where the next draw begins."""
        return {"rows": len(self), "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Draw from there.  Raises `CheckpointError` when the place is in another file."""
        if state["rows"] != len(self):
            raise CheckpointError(
                f"the saved place is in a file of {state['rows']} rows, but {self.path} has {len(self)}."
                " Resume with the file the run was started with."
            )
        self._begin(state["epoch"], state["position"])

    @cached_property
    def _file(self) -> PromptFile:
        return PromptFile(
            self.path,
            input_key=str(self._keys["input_key"]),
            label_key=self._keys["label_key"],
            metadata_key=str(self._keys["metadata_key"]),
        )

    @cached_property
    def _order(self) -> list[int]:
        """Row numbers in the order of the epoch."""
        order = list(range(len(self)))
        if self._shuffle_seed is not None:
            random.Random(f"{self._shuffle_seed}/{self._epoch}").shuffle(order)
        return order

    def _begin(self, epoch: int, position: int = 0) -> None:
        self._epoch, self._position = epoch, position
        self.__dict__.pop("_order", None)

    def _next(self) -> PromptRow:
        if self._position == len(self):
            self._begin(self._epoch + 1)
        row = self._file[self._order[self._position]]
        self._position += 1
        return row
