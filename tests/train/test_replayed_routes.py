"""Experts are those that the engine chose, also where the trainer's router rounds differently."""

from __future__ import annotations

import dataclasses
import pickle
import uuid
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tiny_models import make_tiny_model
from tests.train.expert_models import (
    COMMON,
    LAYOUTS,
    PP,
    RECOMPUTED,
    UNEVEN,
    batches,
    config_for,
    random_routes,
    start,
    untimed,
    with_routes,
)
from tests.train.harness import RankLauncher, make_batch, make_config, run_ranks
from tests.train.whole_models import gather

from slime.errors import TrainerError
from slime.rollout.train_batch import Ragged, RoutedExperts, TrainBatch
from slime.train.routing import check_routes, routers_of

from megatron.core import parallel_state  # isort: skip


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
    own = batch.loss_masks.like(rank.policy.forward(batch.without_routes()).numpy())
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


# --- what a rank takes of a batch's experts -------------------------------------------------------------


def kept_in(folder: str) -> Any:
    """Stores a part in a file of `folder`, and returns its path."""
    return lambda part: _saved(Path(folder) / uuid.uuid4().hex, part)


def _saved(path: Path, part: list[np.ndarray[Any, Any]]) -> Path:
    path.write_bytes(pickle.dumps(part))
    return path


#: (path, bytes) of what this process has read
READ: list[tuple[Path, int]] = []


def read_back(paths: list[Path]) -> list[list[np.ndarray[Any, Any]]]:
    parts = [pickle.loads(path.read_bytes()) for path in paths]
    READ.extend((path, sum(array.nbytes for array in part)) for path, part in zip(paths, parts, strict=True))
    return parts


def trained(launcher: RankLauncher, config: Any, batch: TrainBatch) -> Any:
    """(stage, data-parallel rank), layers, what was read for one step, the metrics, gradients and weights after it."""
    rank = start(launcher, config)
    READ.clear()
    metrics = untimed(rank.train(batch))
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    numbers = {
        name: (tensor.detach().clone(), getattr(tensor, "main_grad", tensor).detach().clone())
        for chunk in rank.policy.chunks
        for name, tensor in chunk.named_parameters()
    }
    found = place, rank.routed_layers(), list(READ), metrics, numbers
    rank.close()
    return found


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    "flags",
    [UNEVEN, PP | {"num_layers_per_virtual_pipeline_stage": 1}],
    ids=["uneven stages", "interleaved stages"],
)
def test_a_rank_takes_the_experts_of_its_samples_and_layers_and_trains_the_same(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    batch = make_batch(samples=8, response=(4, 16), masked=False)
    routes = [random_routes(len(tokens) - 1, i) for i, tokens in enumerate(batch.tokens)]
    whole = with_routes(batch, routes)
    config = config_for("softmax", megatron=flags, actor_num_gpus_per_node=4)
    before = run_ranks(trained, 4, config, whole)
    layers = [held for _, held, *_ in before]
    assert len(set(layers)) == 2 and sorted({*layers[0], *layers[-1]}) == list(range(COMMON["num_layers"]))
    assert whole.routed_experts is not None
    divided = whole.routed_experts.divided(layers, kept_in(str(tmp_path)), read_back)
    after = run_ranks(trained, 4, config, dataclasses.replace(whole, routed_experts=divided))
    path_of = {path: (i, part) for i, parts in enumerate(divided.parts) for part, path in enumerate(parts)}
    taken: dict[tuple[int, ...], list[int]] = {}
    for (place, held, read, metrics, numbers), (_, _, _, expected, others) in zip(after, before, strict=True):
        samples = [path_of[path][0] for path, _ in read]
        assert {divided.layers[path_of[path][1]] for path, _ in read} == {held}, place
        tokens = sum(len(batch.tokens[i]) - 1 for i in samples)
        assert sum(size for _, size in read) == tokens * len(held) * COMMON["moe_router_topk"], place
        taken.setdefault(held, []).extend(samples)
        assert 0 < len(samples) < 8, "each data-parallel rank has a share"
        assert metrics == expected
        for name, pair in numbers.items():
            assert all(torch.equal(one, other) for one, other in zip(pair, others[name], strict=True)), name
    # A rank with fewer micro-batches than others runs the shortest sample in their place.
    filler = min(range(8), key=lambda i: len(batch.tokens[i]))
    for samples in taken.values():
        assert sorted(set(samples)) == list(range(8))
        assert {i for i in samples if samples.count(i) > 1} <= {filler}, "nothing else is taken twice"


MODEL = SimpleNamespace(num_moe_experts=8, num_layers=3, moe_router_topk=3)


@pytest.mark.parametrize(
    ("shape", "largest", "message"),
    [((4, 2, 3), 7, r"sample 5: .* \(2, 3\)"), ((4, 3, 3), 8, "numbers up to 8"), ((4, 3, 2), 1, r"\(3, 2\)")],
)
def test_routes_of_another_model_are_refused(shape: tuple[int, ...], largest: int, message: str) -> None:
    check_routes(5, (4, 3, 3), np.full((4, 2, 3), [5, 7, 6], dtype=np.uint8), (1, 2), MODEL)
    for divide in (False, True):
        column = RoutedExperts.whole([np.full(shape, largest, dtype=np.uint8)])
        column = column.divided([(1, 2)], lambda array: array, list) if divide else column
        [own] = column.take([0], (1, 2))
        with pytest.raises(TrainerError, match=message):
            check_routes(5, column.shapes[0], own, (1, 2), MODEL)


@pytest.mark.engine
@pytest.mark.slow
def test_routes_for_a_model_without_experts_are_refused(tmp_path: Path) -> None:
    batch = make_batch(samples=2)
    batch = with_routes(batch, [random_routes(len(tokens) - 1, i) for i, tokens in enumerate(batch.tokens)])
    with pytest.raises(AssertionError, match="not a mixture of experts"):
        run_ranks(trained, 1, make_config(make_tiny_model(tmp_path, "qwen3", seed=0)), batch)


def test_a_token_that_was_routed_to_one_expert_twice_is_refused() -> None:
    routes = np.full((4, 3, 3), [5, 7, 6], dtype=np.uint8)
    routes[:, 0] = 0  # a dense layer, whose entries mean nothing
    [own] = RoutedExperts.whole([routes]).take([0], (1, 2))
    check_routes(5, routes.shape, own, (1, 2), MODEL)
    routes[3, 2] = [6, 1, 6]
    [own] = RoutedExperts.whole([routes]).take([0], (1, 2))
    with pytest.raises(TrainerError, match=r"sample 5: token 3 was routed to the experts \[6, 1, 6\] in layer 2"):
        check_routes(5, routes.shape, own, (1, 2), MODEL)
