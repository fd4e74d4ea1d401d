"""The reference policy: a second copy of this rank's weights, exchanged with the model's for a forward pass.

If only adapters are trained, the frozen weights are the same for both, and the copy is one of the adapters alone.

It starts as the weights of the run's model folders. It may be renewed later: every `--ref-update-interval` rollouts, or
from the checkpoint whose weights the run started from. Only a renewed reference is saved in checkpoints, since a
resumed run cannot read it from a folder again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.train.checkpoint_io import Write, load_weights, save_weights, write_now

#: its folder inside the trainer's part of a checkpoint
REFERENCE_PART = "reference"


class ReferenceWeights:
    """A copy of the weights that the chunks hold now, in host memory (pinned if the weights are on a GPU).

    Attributes:
        tensors: The copies, in the order of the chunks' parameters and buffers.
    """

    def __init__(self, chunks: list[Any], *, shares_frozen: bool = True) -> None:
        """Copy the weights.

        Args:
            chunks: The bare chunks.
            shares_frozen: Whether the reference has the same frozen parameters as the model, so that only the others
                are copied.
        """
        self._chunks, self._shares_frozen = chunks, shares_frozen
        self.tensors = [_host_copy(tensor) for tensor in self._live()]
        self._renewed = False

    def renew(self) -> None:
        """Take the model's current weights; from now on the reference is part of the run's checkpoints."""
        for held, live in zip(self.tensors, self._live(), strict=True):
            held.copy_(live)
        self._renewed = True

    def save(self, folder: Path, write: Write = write_now) -> None:
        """Write the reference to `folder` if it was ever renewed (collective)."""
        if self._renewed:
            with self.in_model():
                save_weights(folder, self._chunks, write)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, if it wrote anything (collective). The model then holds these weights too."""
        if folder.is_dir():
            load_weights(folder, self._chunks)
            self.renew()

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model has the reference's weights inside the body, and its own again afterwards, even after an error."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _live(self) -> list[Tensor]:
        found = []
        for chunk in self._chunks:
            parameters = list(chunk.parameters())
            own = [one for one in parameters if one.requires_grad]
            shares = self._shares_frozen and len(own) < len(parameters)
            found += [tensor.data for tensor in (own if shares else (*parameters, *chunk.buffers()))]
        return found

    def _exchange(self) -> None:
        for held, live in zip(self.tensors, self._live(), strict=True):
            own = live.clone()
            live.copy_(held)
            held.copy_(own)


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
