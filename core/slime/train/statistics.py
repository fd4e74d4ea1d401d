"""Sums over tokens that end up equal on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from slime.train.parallel import speaks


def sum_over_ranks(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """Add scalars over micro-batches and ranks, name by name; names that end in `_max` take the greatest.

    One rank speaks for each micro-batch, so tensor- and context-parallel copies count once.  The result is the
    same on every rank, stages that saw no logits included.  In float64, in rank order.
    """
    mine: dict[str, float] = {}
    if speaks():
        for part in parts:
            values = torch.stack([value.detach().double() for value in part.values()]).tolist() if part else []
            _add(mine, dict(zip(part, values, strict=True)))
    if dist.get_world_size() == 1:
        return mine
    everyone: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    total: dict[str, float] = {}
    for one in everyone:
        _add(total, one)
    return total


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        if name not in total:
            total[name] = value
        elif name.endswith("_max"):
            total[name] = max(total[name], value)
        else:
            total[name] += value
