"""The reference policy: a second copy of this rank's weights, exchanged with the model's for a forward pass.

It is what the run's folders say, or has been renewed since: every so many rollouts, or by a checkpoint's weights that a
run started from.  Only then is it part of the checkpoint, since a continued run could not make it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.train.checkpoint_io import load_weights, save_weights

#: where a checkpoint of the trainer has it
REFERENCE_PART = "reference"


class ReferenceWeights:
    """A copy of the weights the chunks hold now, in host memory (pinned where there is a GPU)."""

    def __init__(self, chunks: list[Any]) -> None:
        self._chunks = chunks
        self._held = [_host_copy(tensor) for tensor in self._live()]
        self._renewed = False

    def renew(self) -> None:
        """Take the model's present weights: from now on the reference is part of the run's state."""
        for held, live in zip(self._held, self._live(), strict=True):
            held.copy_(live)
        self._renewed = True

    def save(self, folder: Path) -> None:
        """Write the reference to `folder`, where it has been renewed (collective)."""
        if self._renewed:
            with self.in_model():
                save_weights(folder, self._chunks)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, if it wrote anything (collective).  The model has the same weights afterwards."""
        if folder.is_dir():
            load_weights(folder, self._chunks)
            self.renew()

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model computes with the reference inside, and has its own weights back afterwards, after an error too."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _live(self) -> list[Tensor]:
        return [tensor.data for chunk in self._chunks for tensor in (*chunk.parameters(), *chunk.buffers())]

    def _exchange(self) -> None:
        for held, live in zip(self._held, self._live(), strict=True):
            own = live.clone()
            live.copy_(held)
            held.copy_(own)


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
