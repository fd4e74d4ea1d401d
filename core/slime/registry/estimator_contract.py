"""What an estimator must return, and what it must leave alone: the checks of `contracts` for this kind.

`check_permutation` needs a second call, so a run makes it for its first batches only (`--passive-checks`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, overload

from slime.errors import PluginContractError
from slime.plugin import Advantages, Estimator, EstimatorBatch, TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

#: how far two advantages may differ if the same numbers were added in another order: absolutely below 1, relatively
#: above
_TOLERANCE = 1e-5


def check_advantages(answer: object, masks: Sequence[Tensor], *, returns: bool = False) -> Advantages:
    """An estimator's advantages and returns, as N x [T_i] float32 on the CPU.

    Args:
        answer: What the estimator returned.
        masks: N x [T_i] the loss masks of its input.
        returns: Whether returns are needed for a critic.

    Raises:
        PluginContractError: The tensors do not fit the masks, are not finite, or advantages are not zero where the mask
            is zero.
    """
    if not isinstance(answer, Advantages):
        raise PluginContractError(f"returned {type(answer).__name__}; expected slime.plugin.Advantages.")
    advantages = _checked("advantages", answer.advantages, masks, zero_outside=True)
    if not returns:
        return Advantages(advantages)
    if answer.returns is None:
        raise PluginContractError("returned no returns; expected one per token, to train the critic.")
    return Advantages(advantages, _checked("returns", answer.returns, masks, zero_outside=False))


def check_objective(answer: object, tokens: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """An objective's loss [M], and its metrics as [M] float32 without gradients.

    Args:
        answer: What the objective returned.
        tokens: Its input.

    Raises:
        PluginContractError: It is anything but per-token vectors.
    """
    import torch

    expected = tuple(tokens.log_probs.shape)
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], torch.Tensor)):
        raise PluginContractError(f"returned {type(answer).__name__}; expected (loss [M], metrics: name -> [M]).")
    loss, metrics = answer
    if tuple(loss.shape) != expected:
        raise PluginContractError(
            f"returned a loss of shape {tuple(loss.shape)}; expected one entry per token, {expected}. Do not reduce it:"
            " the trainer weights and sums the tokens."
        )
    if not isinstance(metrics, Mapping):
        raise PluginContractError(f"returned metrics of type {type(metrics).__name__}; expected a dict.")
    for key, values in metrics.items():
        if not isinstance(values, torch.Tensor) or tuple(values.shape) != expected:
            got = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise PluginContractError(f"returned the metric {key!r} as {got}; expected a tensor {expected}.")
    return loss, {key: values.detach().float() for key, values in metrics.items()}


class CopiedWhenRead(Sequence[dict[str, Any]]):
    """Samples' metadata, each copied when it is first read.

    A reader gets dictionaries of its own. Those that nobody reads, which can hold whole conversations, cost nothing.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], order: Sequence[int] | None = None) -> None:
        """`order`: indices of the rows in the order to show them in; default: the same order."""
        self._rows = rows
        self._order = range(len(rows)) if order is None else order
        self._copies: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        places = range(len(self))[index]
        return self._copy(places) if isinstance(places, int) else [self._copy(place) for place in places]

    def _copy(self, place: int) -> dict[str, Any]:
        if place not in self._copies:
            self._copies[place] = copy.deepcopy(self._rows[self._order[place]])
        return self._copies[place]

    def reordered(self, order: Sequence[int]) -> CopiedWhenRead:
        """The same rows, without changes that a reader made, in another order."""
        return CopiedWhenRead(self._rows, [self._order[place] for place in order])


def copy_batch(batch: EstimatorBatch, order: Sequence[int] | None = None) -> EstimatorBatch:
    """A copy that shares no memory with `batch`.

    Args:
        batch: A batch of N samples.
        order: [N] indices of the samples in the order of the copy; default: the same order.
    """
    import torch

    indices = range(len(batch.loss_masks)) if order is None else order
    index_tensor = torch.tensor(list(indices), dtype=torch.int64)
    columns: dict[str, Any] = {}
    for column in fields(batch):
        value = getattr(batch, column.name)
        if column.name == "columns":
            columns[column.name] = {name: [part[i].clone() for i in indices] for name, part in value.items()}
        elif isinstance(value, Mapping):
            columns[column.name] = {name: part[index_tensor] for name, part in value.items()}
        elif isinstance(value, Sequence) and not value:  # `metadata` in batches that authors make without it
            columns[column.name] = []
        elif isinstance(value, CopiedWhenRead):
            columns[column.name] = value.reordered(indices)
        elif isinstance(value, list):
            columns[column.name] = [
                value[index].clone() if isinstance(value[index], torch.Tensor) else copy.deepcopy(value[index])
                for index in indices
            ]
        elif value is not None:
            columns[column.name] = value[index_tensor]
    return replace(batch, **columns)


def check_untouched(before: EstimatorBatch, after: EstimatorBatch) -> None:
    """Raise `PluginContractError` if an estimator changed its input."""
    import torch

    for column in fields(before):
        if column.name == "metadata":  # nothing reads it after the estimator, and values of any type cannot be compared
            continue
        old, new = _parts(getattr(before, column.name)), _parts(getattr(after, column.name))
        same = len(old) == len(new) and all(a.shape == b.shape for a, b in zip(old, new, strict=True))
        if not same or (old and not torch.allclose(torch.cat(old), torch.cat(new), rtol=0, atol=0, equal_nan=True)):
            raise PluginContractError(
                f"changed batch.{column.name}; an estimator must not change its input (clone it first)."
            )


def check_permutation(
    estimator: Estimator,
    batch: EstimatorBatch,
    answer: Advantages,
    *,
    order: Sequence[int] | None = None,
) -> None:
    """Check that an estimator's result does not depend on the order of the batch, by a second call in another order.

    Args:
        estimator: The estimator; what it raises passes.
        batch: The batch that `answer` was given for; it is copied, never changed.
        answer: Its advantages and, if there are any, its returns.
        order: The other order, as indices into the batch; default: backwards.

    Raises:
        PluginContractError: The answers differ.
    """
    import torch

    indices = list(range(len(batch.loss_masks)))[::-1] if order is None else list(order)
    permuted = copy_batch(batch, indices)
    masks = copy_batch(permuted).loss_masks
    with torch.no_grad():
        raw = estimator.advantages(permuted)
    again = check_advantages(raw, masks, returns=answer.returns is not None)
    for column in ("advantages", "returns"):
        old, new = getattr(answer, column), getattr(again, column)
        if old is None or new is None:
            continue
        for index, value in zip(indices, new, strict=True):
            expected = old[index].detach().to("cpu", torch.float32)
            wrong = (value - expected).abs() > _TOLERANCE * expected.abs().clamp(min=1)
            if bool(wrong.any()):
                token = int(wrong.nonzero()[0])
                raise PluginContractError(
                    f"returned {column} of sample {index}: token {token} is {float(expected[token])}, but"
                    f" {float(value[token])} when the samples came in another order; expected the same within"
                    f" {_TOLERANCE:g} (samples belong together by group_ids and rollout_ids, never by their position)"
                )


def _parts(value: Tensor | list[Tensor] | Mapping[str, Tensor | list[Tensor]] | None) -> list[Tensor]:
    if isinstance(value, Mapping):
        return [part for one in value.values() for part in _parts(one)]
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
