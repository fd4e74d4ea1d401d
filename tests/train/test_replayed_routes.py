"""Experts are those that the engine chose, also where the trainer's router rounds differently."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.expert_models import COMMON, LAYOUTS, RECOMPUTED, batches, config_for, start, with_routes
from tests.train.harness import RankLauncher, run_ranks
from tests.train.whole_models import gather

from slime.errors import TrainerError
from slime.rollout.train_batch import Ragged, TrainBatch
from slime.train.routing import check_routes, routers_of


def twins(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Experts 2k and 2k + 1 have almost the same score, so that rounding decides between them."""
    if "router" not in name:
        return tensor
    return tensor.view(4, 2, -1)[:, :1].expand(-1, 2, -1).reshape(tensor.shape) + 1e-6 * tensor


def perturbed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What another order of additions may do to the router's scores."""
    return twins(name, tensor) - (2e-6 * tensor if "router" in name else 0)


def as_engine(launcher: RankLauncher, config: Any, batch: TrainBatch) -> tuple[Any, list[np.ndarray[Any, Any]]]:
    """Log-probs, and the experts that were chosen for each token of each sample: one sample at a time."""
    rank = start(launcher, config, twins)
    chosen: dict[int, list[torch.Tensor]] = {}
    for router in [router for chunk in rank.policy.chunks for router in routers_of(chunk)]:
        stock = router.routing

        def routing(logits: Any, padding_mask: Any = None, router: Any = router, stock: Any = stock) -> Any:
            weights, choice = stock(logits, padding_mask)
            chosen.setdefault(router.layer_number - 1, []).append(choice.nonzero()[:, 1].view(len(choice), -1))
            return weights, choice

        router.routing = routing
    log_probs, routes = [], []
    for i, tokens in enumerate(batch.tokens):
        chosen.clear()
        log_probs += rank.log_probs(_one(batch, i))
        shape = (len(tokens) - 1, COMMON["num_layers"], COMMON["moe_router_topk"])
        found = np.zeros(shape, dtype=np.uint8)
        for layer, parts in chosen.items():
            found[:, layer] = torch.cat(parts).numpy()
        # engines report experts in any order
        routes.append(np.ascontiguousarray(found[..., ::-1]))
    rank.close()
    return log_probs, routes


def _one(batch: TrainBatch, i: int) -> TrainBatch:
    ids = {name: getattr(batch, name)[i : i + 1] for name in ("rewards", "group_ids", "rollout_ids", "step_ids")}
    return TrainBatch(
        rollout=0,
        tokens=Ragged.of([batch.tokens[i]], np.int32),
        loss_masks=Ragged.of([batch.loss_masks[i]], np.float32),
        sample_ids=batch.sample_ids[i : i + 1],
        rollout_log_probs=None,
        **ids,
    )


def replayed(launcher: RankLauncher, config: Any, batch: TrainBatch) -> Any:
    """Log-probs with the engine's choice and with the trainer's own, and how far a step moves each tensor."""
    rank = start(launcher, config, perturbed)
    with_choice = rank.log_probs(batch)
    own = batch.loss_masks.like(rank.policy.score(batch.without_routes()).numpy())
    before = gather(rank.policy.chunks)
    assert rank.train(batch)["micro_batches"] > 1, "the order of backward passes would not matter"
    after = gather(rank.policy.chunks)
    rank.close()
    return with_choice, own, {name: after[name] - before[name] for name in before}


@cache
def engine(model: str) -> Any:
    return run_ranks(as_engine, 1, config_for(model), batches()[0])[0]


@cache
def one_rank_moves(model: str) -> dict[str, torch.Tensor]:
    moves: dict[str, torch.Tensor]
    [(_, _, moves)] = run_ranks(
        replayed, 1, config_for(model, max_tokens_per_gpu=30), with_routes(batches()[0], engine(model)[1])
    )
    return moves


def gap(ours: list[np.ndarray[Any, Any]], theirs: list[np.ndarray[Any, Any]]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


REPLAYS = [
    ("softmax", None, {}),
    ("sigmoid, latent attention", None, RECOMPUTED["full"]),
    ("sigmoid, latent attention", "tensor 2", {}),
    ("softmax", "context 2, expert 2", {}),
    ("softmax", "pipeline 2, uneven", RECOMPUTED["full"]),  # the first stage has experts, and computes them again late
]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(("model", "layout", "flags"), REPLAYS, ids=str)
def test_replay_closes_the_gap_of_a_router_that_rounds_differently(
    model: str, layout: str | None, flags: dict[str, Any]
) -> None:
    log_probs, routes = engine(model)
    config = config_for(model, layout, megatron=flags, max_tokens_per_gpu=30)
    world_size = LAYOUTS[layout][0] if layout else 1
    expected = one_rank_moves(model)
    for with_choice, own, moves in run_ranks(replayed, world_size, config, with_routes(batches()[0], routes)):
        assert gap(own, log_probs) > 1e-2
        assert gap(with_choice, log_probs) < 1e-4
        assert all((moves[name] - move).abs().max() < 2e-6 for name, move in expected.items())
    routers = {name: move for name, move in expected.items() if "router" in name}
    assert all(move.abs().max() > 1e-5 for move in routers.values()), "gradients must reach the routers"


@pytest.mark.parametrize(
    ("shape", "largest", "message"),
    [((4, 2, 3), 7, r"sample 5: .* \(2, 3\)"), ((4, 3, 3), 8, "numbers up to 8"), ((4, 3, 2), 1, r"\(3, 2\)")],
)
def test_routes_of_another_model_are_refused(shape: tuple[int, ...], largest: int, message: str) -> None:
    model = SimpleNamespace(num_moe_experts=8, num_layers=3, moe_router_topk=3, moe_layer_freq=1)
    check_routes({5: np.full((4, 3, 3), [5, 7, 6], dtype=np.uint8)}, model)
    with pytest.raises(TrainerError, match=message):
        check_routes({5: np.full(shape, largest, dtype=np.uint8)}, model)
    with pytest.raises(TrainerError, match="not a mixture of experts"):
        check_routes({}, SimpleNamespace(num_moe_experts=None))


def test_a_token_that_was_routed_to_one_expert_twice_is_refused() -> None:
    model = SimpleNamespace(num_moe_experts=8, num_layers=3, moe_router_topk=3, moe_layer_freq=[0, 1, 1])
    routes = np.full((4, 3, 3), [5, 7, 6], dtype=np.uint8)
    routes[:, 0] = 0  # a dense layer, whose entries mean nothing
    check_routes({5: routes}, model)
    routes[3, 2] = [6, 1, 6]
    with pytest.raises(TrainerError, match=r"sample 5: token 3 was routed to the experts \[6, 1, 6\] in layer 2"):
        check_routes({5: routes}, model)
