"""Mixtures of experts and latent attention: the same numbers under every layout, replayed routes, auxiliary losses."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.flag_cases import MOVES_EXPERTS
from tests.train.harness import Centred, RankLauncher, make_batch, make_config, run_ranks
from tests.train.whole_models import fill, gather

from slime.engine.ports import free_port
from slime.errors import TrainerError
from slime.rollout.train_batch import Ragged, TrainBatch
from slime.train.layers import repair_without_transformer_engine
from slime.train.routing import check_routes, routers_of

_COMMON = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "vocab_size": 128,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 32,
    "moe_router_topk": 3,
    "adam_eps": 1e-3,
    "lr": 1e-3,
}
#: two models that together have everything that families combine
MODELS: dict[str, dict[str, Any]] = {
    "softmax": {"num_query_groups": 2, "qk_layernorm": True, "rotary_interleaved": True, "rotary_percent": 0.5},
    "sigmoid, latent attention": {
        "num_query_groups": 4,
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 12,
        "qk_layernorm": True,
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale_all_dim": 1.0,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 32,
    },
}
PP = {"pipeline_model_parallel_size": 2}
#: the first stage of the second model has no experts
UNEVEN = PP | {"num_layers_in_first_pipeline_stage": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "expert 2": (2, {"expert_model_parallel_size": 2}),
    "tensor 2": (2, {"tensor_model_parallel_size": 2}),
    "tensor 2, experts whole": (2, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "pipeline 2, uneven": (2, UNEVEN),
    "pipeline 2, virtual 2": (2, PP | {"num_layers_per_virtual_pipeline_stage": 1}),
    "context 2": (2, {"context_parallel_size": 2}),
    "tensor 2, expert 2": (
        2,
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ),
    "context 2, expert 2": (2, {"context_parallel_size": 2, "expert_model_parallel_size": 2}),
    "expert 2, plain optimizer": (2, {"expert_model_parallel_size": 2, "use_distributed_optimizer": False}),
    "data 2, overlapped": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 2000}),
}

#: compared with transformers in `test_families.py`, and below in checkpoints and replay
OF_FAMILIES = {"expert 2", "tensor 2", "tensor 2, expert 2", "context 2, expert 2"}


def config_for(model: str, layout: str | None = None, *, megatron: dict[str, Any] | None = None, **options: Any) -> Any:
    world_size, sizes = LAYOUTS[layout] if layout else (1, {})
    flags = _COMMON | MODELS[model] | sizes | (megatron or {})
    return make_config(None, world_size=world_size, megatron=flags, **{"max_tokens_per_gpu": 60} | options)


def start(launcher: RankLauncher, config: Any, change: Any = None) -> Any:
    rank = launcher.start(config, Centred())
    fill(rank.policy.chunks, *([] if change is None else [change]))
    rank.policy.optimizer.reload_model_params()
    return rank


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


AUXILIARY = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}


def training(launcher: RankLauncher, config: Any, batches: list[TrainBatch]) -> tuple[list[Any], Any, Any]:
    """Metrics of each rollout, log-probs before and weights after."""
    rank = start(launcher, config)
    log_probs = rank.log_probs(batches[0])
    metrics = [untimed(rank.train(batch)) for batch in batches]
    rank.policy.finish_param_gather()
    weights = gather(rank.policy.chunks)
    rank.close()
    return metrics, log_probs, weights


def batches() -> list[TrainBatch]:
    return [make_batch(seed=seed, samples=6, response=(1, 16), masked=False) for seed in (1, 2)]


@cache
def one_rank(model: str, auxiliary: bool = False) -> Any:
    return run_ranks(training, 1, config_for(model, megatron=AUXILIARY if auxiliary else {}), batches())[0]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in OF_FAMILIES])
def test_training_equals_that_of_one_rank(layout: str, model: str) -> None:
    world_size, sizes = LAYOUTS[layout]
    # Auxiliary losses are of each micro-batch, and data-parallel ranks make other micro-batches.
    auxiliary = not sizes.keys() & {"expert_model_parallel_size", "overlap_param_gather"}
    expected_metrics, expected_log_probs, expected = one_rank(model, auxiliary)
    budget = 60 // sizes.get("context_parallel_size", 1)
    config = config_for(model, layout, megatron=AUXILIARY if auxiliary else {}, max_tokens_per_gpu=budget)
    answers = run_ranks(training, world_size, config, batches())
    for metrics, log_probs, _ in answers:
        for got, want in zip(metrics, expected_metrics, strict=True):
            assert set(got) == set(want)
            # A context-parallel rank holds a part of each sample, so that the same micro-batches fit into its limit.
            other_plan = set() if set(sizes) == {"context_parallel_size"} else {"micro_batches"}
            for name in set(want) - other_plan:
                assert got[name] == pytest.approx(want[name], abs=2e-5, rel=2e-5), name
        assert max(np.abs(a - b).max() for a, b in zip(log_probs, expected_log_probs, strict=True)) < 1e-5
    weights = answers[0][2]
    assert set(weights) == set(expected)
    for name, weight in expected.items():
        assert (weights[name] - weight).abs().max() < 2e-6, name
    assert expected_metrics[0]["expert_load"] > 1.2 and expected_metrics[0]["router_entropy"] > 0.1
    assert expected_metrics[0]["dropped_tokens"] == 0


# --- the same in one process: recomputation, flags, auxiliary losses -----------------------------------


def cases(_: RankLauncher, configs: list[Any], batch: TrainBatch) -> list[tuple[dict[str, float], Any]]:
    """Metrics and weights after one rollout, of each configuration."""
    found = []
    for config in configs:
        rank = start(RankLauncher(0, 1, free_port()), config)
        metrics = untimed(rank.train(batch))
        found.append((metrics, gather(rank.policy.chunks)))
        rank.close()
    return found


RECOMPUTED = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "shared_experts", "mlp"]},
    "experts, old spelling": {"moe_layer_recompute": True},
    "latent attention": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
}
FOR_SPEED = {"moe_grouped_gemm": True, "moe_permute_fusion": True, "gradient_accumulation_fusion": False}


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("replayed", [False, True], ids=["own routes", "replayed"])
def test_recomputation_and_flags_for_speed_change_nothing(replayed: bool) -> None:
    model = "sigmoid, latent attention"
    batch = make_batch(samples=6, response=(1, 16))
    if replayed:
        batch = with_routes(batch, [random_routes(len(tokens) - 1, i) for i, tokens in enumerate(batch.tokens)])
    kinds = RECOMPUTED | {"speed": FOR_SPEED}
    configs = [config_for(model, megatron=AUXILIARY | flags, max_tokens_per_gpu=30) for flags in ({}, *kinds.values())]
    [[(metrics, weights), *others]] = run_ranks(cases, 1, configs, batch)
    assert metrics["micro_batches"] > 2, "the order of backward passes would not matter"
    for name, (got, found) in zip(kinds, others, strict=True):
        assert got == pytest.approx(metrics, rel=1e-5, abs=1e-6), name
        assert max((found[key] - weight).abs().max() for key, weight in weights.items()) < 1e-6, name


@pytest.mark.slow
@pytest.mark.engine
def test_every_flag_of_experts_moves_a_number() -> None:
    model = "sigmoid, latent attention"
    plain = [config_for(model, megatron=beside) for _, beside in MOVES_EXPERTS.values()]
    moved = [config_for(model, megatron=beside | {key: value}) for key, (value, beside) in MOVES_EXPERTS.items()]
    [found] = run_ranks(cases, 1, [*plain, *moved], make_batch(samples=6, steps=2, response=(1, 16)))
    for key, (_, before), (metrics, after) in zip(MOVES_EXPERTS, found[: len(plain)], found[len(plain) :], strict=True):
        assert any(not torch.equal(before[name], after[name]) for name in before), key
        assert (metrics["dropped_tokens"] > 0) == ("capacity" in key or "drop" in key), key


def twice(launcher: RankLauncher, config: Any, batch: TrainBatch) -> list[dict[str, float]]:
    """Metrics of two rollouts with the same batch."""
    rank = start(launcher, config)
    metrics = [rank.train(batch), rank.train(batch)]
    rank.close()
    return metrics


@pytest.mark.slow
@pytest.mark.engine
def test_auxiliary_losses_are_means_over_tokens_with_gradients_of_their_size() -> None:
    batch = make_batch(samples=6, response=(4, 16), masked=False)
    batch.rewards[:] = 1.0  # no advantage: the auxiliary loss is all there is
    flags = {"optimizer": "sgd", "lr": 1e-4, "clip_grad": 1e9}
    before, after = run_ranks(twice, 1, config_for("softmax", megatron=flags | {"moe_z_loss_coeff": 0.5}), batch)[0]
    fall = 0.5 * _COMMON["num_layers"] * (before["moe_z_loss"] - after["moe_z_loss"])
    assert fall == pytest.approx(1e-4 * before["grad_norm"] ** 2, rel=0.05)
    before, after = run_ranks(twice, 1, config_for("softmax", megatron=flags | {"moe_aux_loss_coeff": 0.5}), batch)[0]
    assert 1.0 < before["moe_aux_loss"] < 8.0  # 1 if balanced, 8 if all tokens go to one of 8 experts
    assert after["moe_aux_loss"] < before["moe_aux_loss"]


def wrapped_biases(launcher: RankLauncher, config: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each router's bias before and after the model is converted to half precision."""
    from slime.train import parallel
    from slime.train.chunks import build_chunks, wrap_chunks
    from slime.train.settings import train_settings

    settings = train_settings(config, None)
    meeting = {"rank": 0, "world_size": 1, "meeting": ("127.0.0.1", launcher.port)}
    chunks = build_chunks(settings, parallel.start(config, settings.transformer, **meeting))
    fill(chunks)
    before = [router.expert_bias.clone() for router in routers_of(chunks[0])]
    wrap_chunks(settings, chunks)
    after = [router.expert_bias.clone() for router in routers_of(chunks[0])]
    parallel.stop()
    return list(zip(before, after, strict=True))


@pytest.mark.slow
@pytest.mark.engine
def test_half_precision_does_not_round_the_bias_of_the_choice() -> None:
    config = config_for("sigmoid, latent attention", megatron={"bf16": True})
    [biases] = run_ranks(wrapped_biases, 1, config)
    assert len(biases) == 3
    assert all(after.dtype == torch.float32 and torch.equal(before, after) for before, after in biases)


def test_megatron_is_repaired_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nothing rewrites megatron.core, but without TransformerEngine it lacks these names there too."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", True)
    repair_without_transformer_engine()
    assert moe_utils.te_general_gemm is None
    assert multi_latent_attention.HAVE_TE is False


def test_an_expert_bias_moves_only_if_told_to() -> None:
    """Engines choose experts by the bias of the last sync."""

    from slime.train.settings import train_settings

    config = config_for("sigmoid, latent attention")
    assert train_settings(config, None).transformer.moe_router_bias_update_rate == 0.0


# --- checkpoints ---------------------------------------------------------------------------------------


def saved(launcher: RankLauncher, config: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Save after the first rollout; the weights after the second."""
    rank = start(launcher, config)
    rank.train(batches()[0])
    rank.save(folder)
    rank.train(batches()[1])
    weights = gather(rank.policy.chunks)
    rank.close()
    return weights


def resumed(launcher: RankLauncher, config: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The weights after the second rollout, from what `saved` saved after the first."""
    rank = start(launcher, config, lambda _, tensor: tensor * 1.1)
    rank.load(folder)
    rank.train(batches()[1])
    weights = gather(rank.policy.chunks)
    rank.close()
    return weights


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("expert 2", None),
        (None, "expert 2"),
        ("pipeline 2, uneven", "tensor 2, expert 2"),
        (None, "pipeline 2, uneven"),
    ],
    ids=str,
)
def test_a_checkpoint_is_continued_under_another_layout(before: str | None, after: str | None, tmp_path: Path) -> None:
    """With the optimizer's state, which Megatron alone cannot move into and out of expert parallelism."""
    model = "sigmoid, latent attention"
    sizes = {None: 1, **{name: size for name, (size, _) in LAYOUTS.items()}}
    expected = run_ranks(saved, sizes[before], config_for(model, before), tmp_path / "state")[0]
    got = run_ranks(resumed, sizes[after], config_for(model, after), tmp_path / "state")[0]
    for name, weight in expected.items():
        assert (got[name] - weight).abs().max() < 2e-6, name


# --- replay of the engine's choice ---------------------------------------------------------------------


def with_routes(batch: TrainBatch, routes: list[np.ndarray[Any, Any]]) -> TrainBatch:
    return dataclasses.replace(batch, routed_experts=routes)


def random_routes(tokens: int, seed: int) -> np.ndarray[Any, Any]:
    """[tokens, layers, K] different experts."""
    scores = np.random.default_rng(seed).random((tokens, _COMMON["num_layers"], _COMMON["num_moe_experts"]))
    return scores.argsort(-1)[..., : _COMMON["moe_router_topk"]].astype(np.uint8)


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
        shape = (len(tokens) - 1, _COMMON["num_layers"], _COMMON["moe_router_topk"])
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
