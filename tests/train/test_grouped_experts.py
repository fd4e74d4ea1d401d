"""The experts of a layer, computed together, equal Megatron's, which are computed one after the other."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.train.expert_models import config_for, start
from tests.train.harness import RankLauncher, run_ranks

from slime.train.experts import GroupedExperts


def both_ways(launcher: RankLauncher, config: Any, *, frozen: bool) -> list[list[torch.Tensor]]:
    """Result and gradients of one layer's experts: together, and one after the other as Megatron runs them."""
    rank = start(launcher, config)
    experts = next(module for module in rank.policy.chunks[0].modules() if isinstance(module, GroupedExperts))
    parameters = list(experts.parameters())
    for parameter in parameters[:1] if frozen else []:
        parameter.requires_grad_(False)
    sizes = torch.tensor([3, 0, 5, 1, *[0] * (experts.num_local_experts - 4)])
    rows = torch.randn(9, experts.config.hidden_size, requires_grad=True)
    weights, factor = torch.rand(9, requires_grad=True), torch.randn(9, experts.config.hidden_size)
    trained = [one for one in parameters if one.requires_grad]
    answers = []
    for forward in (experts.forward, super(GroupedExperts, experts).forward):
        result, bias = forward(rows, sizes, weights)
        assert bias is None
        totals = [one.main_grad.zero_() for one in trained]
        of_rows, of_weights, *returned = torch.autograd.grad(result, [rows, weights, *trained], factor)
        fused = experts.config.gradient_accumulation_fusion
        gradients = [total.clone() for total in totals] if fused else returned
        answers.append([result.detach(), of_rows, of_weights, *gradients])
    rank.close()
    return answers


@pytest.mark.engine
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "one frozen"])
@pytest.mark.parametrize("fused", [False, True], ids=["returned", "summed"])
def test_experts_together_equal_one_after_the_other(frozen: bool, fused: bool) -> None:
    config = config_for("softmax", megatron={"gradient_accumulation_fusion": fused})
    together, apart = run_ranks(partial(both_ways, frozen=frozen), 1, config)[0]
    assert len(together) == 3 + 16 - frozen
    for one, other in zip(together, apart, strict=True):
        assert (one - other).abs().max() < 1e-6
    assert all(one.abs().max() > 0 for one in together[: 4 - frozen])
