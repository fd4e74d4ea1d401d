"""Log-probabilities of a whole batch, gathered so that every rank holds all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
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
    ends = np.concatenate([[0], np.cumsum(batch.response_lengths)]).tolist()
    flat = torch.zeros(ends[-1], device=device)
    if speaks():
        for micro_batch, values in zip(micro_batches, scored, strict=True):
            if not micro_batch.counts:
                continue
            at = 0
            for i in micro_batch.samples:
                length = ends[i + 1] - ends[i]
                flat[ends[i] : ends[i + 1]] = values[at : at + length]
                at += length
    # Each entry has one speaker, so the sum is a copy.
    dist.all_reduce(flat)
    flat = flat.cpu()
    return [flat[start:end] for start, end in zip(ends[:-1], ends[1:], strict=True)]
