"""Log-probabilities of a whole batch, gathered so that every rank holds all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from slime.train.forward import Pipeline
from slime.train.packing import MicroBatch
from slime.train.parallel import speaks

if TYPE_CHECKING:
    from slime.data import TrainBatch


def score_batch(
    pipeline: Pipeline, batch: TrainBatch, micro_batches: list[MicroBatch], device: torch.device
) -> list[Tensor]:
    """N x [T_i] float32 on the CPU, the same on every rank (collective).

    micro_batches   this data-parallel rank's share; over all ranks each sample appears once among those that count
    """
    scored = pipeline.score(micro_batches)
    flat = torch.zeros(int(batch.response_lengths.sum()), device=device)
    if speaks():
        for micro_batch, values in zip(micro_batches, scored, strict=True):
            if micro_batch.counts:
                flat[micro_batch.token_ids] = values
    # Each entry has one speaker, so the sum is a copy.
    dist.all_reduce(flat)
    return list(torch.split(flat.cpu(), batch.response_lengths.tolist()))
