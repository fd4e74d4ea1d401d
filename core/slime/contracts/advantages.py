"""What an estimator must hand back, and that it leaves its input alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from slime.errors import PluginContractError
from slime.plugin import Advantages, EstimatorBatch

if TYPE_CHECKING:
    from torch import Tensor


def check_advantages(answer: object, masks: Sequence[Tensor], *, returns: bool = False) -> Advantages:
    """An estimator's answer, as N x [T_i] float32 on the CPU.

    masks     N x [T_i] the loss masks of its input
    returns   whether a critic waits for returns

    Raises `PluginContractError` when the tensors do not fit the masks, are not finite, or advantages are not zero where
    the mask is zero.
    """
    if not isinstance(answer, Advantages):
        raise PluginContractError(f"returned {type(answer).__name__}; expected slime.plugin.Advantages.")
    advantages = _checked("advantages", answer.advantages, masks, zero_outside=True)
    if not returns:
        return Advantages(advantages)
    if answer.returns is None:
        raise PluginContractError("returned no returns; expected one per token, which the critic is trained on.")
    return Advantages(advantages, _checked("returns", answer.returns, masks, zero_outside=False))


def copy_batch(batch: EstimatorBatch) -> EstimatorBatch:
    """A copy that shares no memory with `batch`."""
    columns: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if value is not None:
            columns[field.name] = [part.clone() for part in value] if isinstance(value, list) else value.clone()
    return replace(batch, **columns)


def check_untouched(before: EstimatorBatch, after: EstimatorBatch) -> None:
    """Raise `PluginContractError` where an estimator wrote to its input."""
    import torch

    for field in fields(before):
        old, new = _parts(getattr(before, field.name)), _parts(getattr(after, field.name))
        same = len(old) == len(new) and all(a.shape == b.shape for a, b in zip(old, new, strict=True))
        if not same or (old and not torch.equal(torch.cat(old), torch.cat(new))):
            raise PluginContractError(
                f"changed batch.{field.name}; an estimator must not write to its input (clone it first)."
            )


def _parts(value: Tensor | list[Tensor] | None) -> list[Tensor]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _checked(column: str, values: Sequence[Tensor], masks: Sequence[Tensor], *, zero_outside: bool) -> list[Tensor]:
    import torch

    if len(values) != len(masks):
        raise PluginContractError(
            f"returned {len(values)} {column}; expected one tensor for each of {len(masks)} samples."
        )
    for i, (part, mask) in enumerate(zip(values, masks, strict=True)):
        if not isinstance(part, torch.Tensor) or part.shape != mask.shape:
            got = tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
            raise PluginContractError(
                f"returned {column} of sample {i} as {got}; expected a tensor of the mask's shape {tuple(mask.shape)}."
            )
    if not masks:
        return []
    # One vector for the rest: a batch has thousands of short samples.
    flat, mask = torch.cat(list(values)).detach().to("cpu", torch.float32), torch.cat(list(masks))
    lengths = [part.numel() for part in masks]
    checks = [(~torch.isfinite(flat), "finite numbers")]
    if zero_outside:
        checks.append((flat.ne(0) & mask.eq(0), "0, because the token's loss mask is 0"))
    for wrong, expected in checks:
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            value, sample = float(flat[at]), 0
            while at >= lengths[sample]:
                at, sample = at - lengths[sample], sample + 1
            raise PluginContractError(
                f"returned {column} of sample {sample}: token {at} is {value}; expected {expected}."
            )
    return list(torch.split(flat, lengths))
