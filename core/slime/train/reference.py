"""The frozen reference policy: a second copy of this rank's weights, exchanged with the model's for a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class ReferenceWeights:
    """A copy of the weights the chunks hold now, in host memory (pinned where there is a GPU)."""

    def __init__(self, chunks: list[Any]) -> None:
        self._chunks = chunks
        self._held = [_host_copy(tensor) for tensor in self._live()]

    def refresh(self) -> None:
        """Take the model's present weights as the reference."""
        for held, live in zip(self._held, self._live(), strict=True):
            held.copy_(live)

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
