"""The check of engines with weights in blocks (`--check-weight-update-equal`).

For such a weight, SGLang's checksum is one of what the numbers stand for with their scales, in bfloat16: another number
of 8 bits always shows, and another scale if it is off by more than bfloat16 rounds. So the check is given the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from slime.errors import WeightSyncError
from slime.plugin.architecture import Architecture
from slime.weights.fp8 import dequantised, scale_of
from slime.weights.verify import WeightCheck
from slime_quantised.blocks import BLOCK

if TYPE_CHECKING:
    from slime.weights.shards import NamedTensors


class QuantisedCheck(WeightCheck):
    """What engines must hold of a model of which some weights are sent in blocks, each followed by its scales."""

    def __init__(
        self,
        model: Architecture,
        in_blocks: Collection[str],
        tp_sizes: Iterable[int],
        *,
        ep_size: int = 1,
        dp_size: int = 1,
    ) -> None:
        """
        Args:
            model: The model as it is trained.
            in_blocks: The names of the weights that are sent in blocks.
            tp_sizes: As of `WeightCheck`.
            ep_size: As of `WeightCheck`.
            dp_size: As of `WeightCheck`.
        """
        super().__init__(model, tp_sizes, ep_size=ep_size, dp_size=dp_size)
        self._in_blocks = in_blocks

    def observe(self, named: NamedTensors) -> NamedTensors:
        """See `WeightCheck.observe`.

        Raises:
            WeightSyncError: As `WeightCheck.observe`; and the scales of a weight do not follow it.
        """
        held: list[tuple[str, Tensor]] = []
        for _ in super().observe(self._dequantised(named, held)):
            yield from held
            held.clear()

    def _dequantised(self, named: NamedTensors, held: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors as the engines' checksums see them; those that are sent are put into `held`."""
        for name, tensor in named:
            held.append((name, tensor))
            if name not in self._in_blocks:
                yield name, tensor
                continue
            scales = next(named, None)
            if scales is None or scales[0] != scale_of(name):
                raise WeightSyncError(
                    f"After {name} the trainer sent {'nothing' if scales is None else scales[0]}; expected"
                    f" {scale_of(name)}."
                )
            held.append(scales)
            yield name, dequantised(tensor, scales[1], BLOCK, dim=0, start=0).bfloat16()
