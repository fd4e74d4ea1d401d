"""How far the engines' log-probs are from those of what their quantised weights stand for.

The trainer computes a batch once more with these numbers in place of its weights. What is left of `logprob_gap_mean`,
which is against the weights that it trains, is not from quantised weights: kernels, quantised activations, older
weights, or a mistake. With parameters in bfloat16 there is a rest that is: they hold these numbers rounded, and engines
multiply with the numbers of 8 bits and the scales.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.plugin.architecture import Rule
from slime.weights.fp8 import blocks_between, dequantised
from slime.weights.shards import local_parameters, spans
from slime_quantised.blocks import BLOCK, largest, numbers, scales_of

if TYPE_CHECKING:
    from slime.rollout.train_batch import TrainBatch
    from slime.train.model import TrainableModel


def dequantised_gap(policy: TrainableModel, batch: TrainBatch, rules: Mapping[str, Rule]) -> dict[str, float]:
    """|trainer's log-prob - engine's| of trained tokens, by what the engines' weights stand for. Collective.

    Args:
        policy: The model that is trained, before it moves.
        batch: The batch that the engines sampled.
        rules: Those of the weights that are quantised, by their Megatron names.
    """
    if batch.rollout_log_probs is None or not (trained := torch.tensor(batch.loss_masks.flat) != 0).any():
        return {}
    policy.finish_param_gather()
    with with_dequantized_weights(policy.chunks, rules):
        ours = policy.forward(batch)
    gap = (ours - torch.tensor(batch.rollout_log_probs.flat)).abs()[trained]
    return {"dequantized_gap_mean": float(gap.mean()), "dequantized_gap_max": float(gap.max())}


@contextmanager
def with_dequantized_weights(chunks: Sequence[Any], rules: Mapping[str, Rule]) -> Iterator[None]:
    """Inside the body, the weights of these rules are what they stand for once they are quantised. Collective.

    They are rounded to the parameters' type. The trained values wait in host memory meanwhile.
    """
    found = [(rules[name], weight.detach()) for name, weight in local_parameters(chunks).items() if name in rules]
    scales = _scales(found)
    own = [weight.to("cpu", copy=True) for _, weight in found]
    try:
        for (rule, weight), of_rule in zip(found, scales, strict=True):
            for name, part, dim, start in _parts(rule, weight):
                first, stop = blocks_between(start, start + part.shape[dim], BLOCK[dim])
                touched = of_rule[name].narrow(dim, first, stop - first)
                held = numbers(part, touched, dim=dim, start=start)
                part.copy_(dequantised(held, touched, BLOCK, dim=dim, start=start))
        yield
    finally:
        for (_, weight), kept in zip(found, own, strict=True):
            weight.copy_(kept)


def _scales(found: Collection[tuple[Rule, Tensor]]) -> list[dict[str, Tensor]]:
    """For each rule the scales of its whole tensors, of which other ranks have parts too."""
    from megatron.core import parallel_state

    of_rules: list[dict[str, Tensor]] = []
    for rule, weight in found:
        grids = {
            name: torch.zeros([-(-n // b) for n, b in zip(shape, BLOCK, strict=True)], device=weight.device)
            for name, shape in rule.hf.items()
        }
        for name, part, dim, start in _parts(rule, weight):
            here = largest(part, dim=dim, start=start)
            touched = grids[name].narrow(dim, start // BLOCK[dim], here.shape[dim])
            touched.copy_(torch.maximum(touched, here))
        of_rules.append(grids)
    for experts, group in (
        (False, parallel_state.get_tensor_model_parallel_group()),
        (True, parallel_state.get_expert_tensor_parallel_group()),
    ):
        mine = [
            grid
            for (rule, _), grids in zip(found, of_rules, strict=True)
            if (rule.expert is not None) == experts
            for grid in grids.values()
        ]
        if mine and dist.get_world_size(group) > 1:
            together = torch.cat([grid.reshape(-1) for grid in mine])
            dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
            for grid, values in zip(mine, torch.split(together, [grid.numel() for grid in mine]), strict=True):
                grid.copy_(values.view_as(grid))
    return [{name: scales_of(grid) for name, grid in grids.items()} for grids in of_rules]


def _parts(rule: Rule, weight: Tensor) -> Iterator[tuple[str, Tensor, int, int]]:
    """What a shard consists of: name of the Hugging Face tensor, the part of it, where it begins along which dim."""
    from megatron.core import parallel_state

    dim, place = rule.parallel_dim or 0, 0
    rank = (
        parallel_state.get_tensor_model_parallel_rank()
        if rule.expert is None
        else parallel_state.get_expert_tensor_parallel_rank()
    )
    for name, start, stop in spans(rule, weight.shape[dim], rank):
        yield name, weight.narrow(dim, place, stop - start), dim, start
        place += stop - start
