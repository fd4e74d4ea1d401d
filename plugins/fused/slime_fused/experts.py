"""Experts of a mixture whose matrix products are one call of torch each (`torch.nn.functional.grouped_mm`).

A product for each expert, as in `slime.train.experts`, starts a kernel for every expert, however few rows it has. Here
one kernel computes all of them, except for gradients that a product adds to what Megatron has summed, as on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.train.experts import GroupedExperts, Parameter, Products


class FusedProducts(Products):
    """Products of all experts in one call, where torch has a kernel for them; slime's own elsewhere.

    The kernel reads the experts' matrices as one tensor, so each call copies them into one for its duration: Megatron's
    buffer has the experts in reverse order, with other parameters between them.
    """

    def __init__(self, tokens_per_expert: Tensor) -> None:
        super().__init__(tokens_per_expert)
        self.ends = tokens_per_expert.cumsum(0).int()

    def product(self, rows: Tensor, matrices: Sequence[Tensor]) -> Tensor:
        """See `Products`."""
        if not _served(rows, *matrices[0].shape):
            return super().product(rows, matrices)
        transposed = not matrices[0].is_contiguous()
        # Copied as they lie in memory.
        stacked = torch.stack([matrix.t() if transposed else matrix for matrix in matrices])
        return F.grouped_mm(rows.contiguous(), stacked.mT if transposed else stacked, offs=self._ends_on(rows.device))

    def gradients(self, grad: Tensor, inputs: Tensor, parameters: Sequence[Parameter]) -> list[Tensor | None]:
        """See `Products`. Where a product adds to what Megatron has summed, it is slime's own."""
        added = any(total is not None for _, total, _ in parameters)
        if added or not any(needed for *_, needed in parameters) or not _served(grad, inputs.size(1), grad.size(1)):
            return super().gradients(grad, inputs, parameters)
        gradients = F.grouped_mm(grad.contiguous().t(), inputs.contiguous(), offs=self._ends_on(grad.device))
        return [one if needed else None for one, (_, _, needed) in zip(gradients, parameters, strict=True)]

    def _ends_on(self, device: torch.device) -> Tensor:
        """The end of each expert's rows; copied to the device once."""
        if self.ends.device != device:
            self.ends = self.ends.to(device)
        return self.ends


def _served(rows: Tensor, *widths: int) -> bool:
    """Whether torch has a kernel for rows of this type and matrices of these widths, which must be of 16 bytes each."""
    if rows.is_cuda:
        typed = rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    else:
        typed = rows.dtype in (torch.float32, torch.bfloat16)
    return typed and len(rows) > 0 and all(width * rows.element_size() % 16 == 0 for width in widths)


class FusedExperts(GroupedExperts):
    """The experts, with one matrix product for all of them."""

    products: ClassVar[type[Products]] = FusedProducts
