"""From sums over tokens to the metrics of a rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from slime.data import TrainBatch

#: sums that are no metric of their own: others are made of them
_PARTS = frozenset({"log_ppl_difference", "weight_sum", "weight_square"})


def add_sums(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add a step's sums to the rollout's, name by name; of names that end in `_max`, keep the greater."""
    for name, value in more.items():
        if name not in total:
            total[name] = value
        else:
            total[name] = max(total[name], value) if name.endswith("_max") else total[name] + value


def token_means(sums: Mapping[str, float], *, steps: int) -> dict[str, float]:
    """What is reported of the sums over the trained tokens of all steps: means over tokens.

    `loss` is the mean over `steps`; `_max` stays; `engine_ppl_ratio` and `engine_ess` are made of several sums.
    """
    tokens = sums["tokens"]
    count = max(tokens, 1.0)
    metrics = {"tokens": tokens, "loss": sums["loss"] / steps, "micro_batches": sums["micro_batches"]}
    for name, value in sums.items():
        if name in metrics or name in _PARTS:
            continue
        key = "logprob_gap_mean" if name == "logprob_gap" else name
        metrics[key] = value if name.endswith("_max") else value / count
    if "log_ppl_difference" in sums:
        metrics["engine_ppl_ratio"] = math.exp(min(sums["log_ppl_difference"] / count, 700.0))
        # Kish's: (sum w)^2 / sum w^2 of n equal weights is n.
        square = sums["weight_square"]
        metrics["engine_ess"] = sums["weight_sum"] ** 2 / square / count if square else 1.0
    return metrics


def advantage_metrics(advantages: Sequence[Tensor], batch: TrainBatch) -> dict[str, float]:
    """Statistics of the advantages, N x [T_i], over the trained tokens of the batch."""
    mask = torch.from_numpy(np.concatenate(batch.loss_masks)) > 0
    values = torch.cat(list(advantages))[mask].double()
    if not values.numel():
        return {}
    return {
        "advantage_mean": float(values.mean()),
        "advantage_std": float(values.std(unbiased=False)),
        "advantage_min": float(values.min()),
        "advantage_max": float(values.max()),
        "advantage_zero_fraction": float((values == 0).double().mean()),
    }


def readable(sums: Mapping[str, float]) -> str:
    """For error messages."""
    return ", ".join(f"{name} {value:g}" for name, value in sums.items())
