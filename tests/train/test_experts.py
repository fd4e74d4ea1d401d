"""Mixtures of experts and latent attention: the same numbers under every layout, and auxiliary losses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.expert_models import (
    AUXILIARY,
    COMMON,
    LAYOUTS,
    MODELS,
    RECOMPUTED,
    batches,
    config_for,
    random_routes,
    start,
    untimed,
    with_routes,
)
from tests.train.flag_cases import MOVES_EXPERTS
from tests.train.harness import RankLauncher, make_batch, run_ranks
from tests.train.whole_models import fill, gather

from slime.engine.ports import free_port
from slime.rollout.train_batch import TrainBatch
from slime.train.layers import repair_without_transformer_engine
from slime.train.routing import routers_of

#: compared with transformers in `test_families.py`, and below in checkpoints and replay
OF_FAMILIES = {"expert 2", "tensor 2", "tensor 2, expert 2", "context 2, expert 2"}


def training(launcher: RankLauncher, config: Any, batches: list[TrainBatch]) -> tuple[list[Any], Any, Any]:
    """Metrics of each rollout, log-probs before and weights after."""
    rank = start(launcher, config)
    log_probs = rank.log_probs(batches[0])
    metrics = [untimed(rank.train(batch)) for batch in batches]
    rank.policy.finish_param_gather()
    weights = gather(rank.policy.chunks)
    rank.close()
    return metrics, log_probs, weights


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


def packed_for_hybridep(launcher: RankLauncher, config: Any, batch: TrainBatch, equal_totals: bool) -> Any:
    """Tokens of each micro-batch with padding and without, metrics and weights. HybridEP itself needs GPUs."""
    rank = start(launcher, config)
    rank.policy._packing = replace(rank.policy._packing, equal_totals=equal_totals)
    packed = rank.policy._micro_batches(batch, list(range(len(batch.tokens))))
    metrics = untimed(rank.train(batch))
    rank.policy.finish_param_gather()
    weights = gather(rank.policy.chunks)
    rank.close()
    return [one.tokens.numel() for one in packed], [one.routed.tokens for one in packed], metrics, weights


@pytest.mark.slow
@pytest.mark.engine
def test_ranks_that_are_padded_to_equally_many_tokens_train_the_same() -> None:
    model, batch = "sigmoid, latent attention", batches()[0]
    [(_, _, expected_metrics, expected)] = run_ranks(packed_for_hybridep, 1, config_for(model), batch, False)
    ranks = run_ranks(packed_for_hybridep, 2, config_for(model, "expert 2"), batch, True)
    (first, run, metrics, weights), (second, others, _, _) = ranks
    assert first == second and all(tokens % 128 == 0 for tokens in first)
    assert run != others, "both must have been padded differently"
    for name in set(expected_metrics) - {"micro_batches"}:
        assert metrics[name] == pytest.approx(expected_metrics[name], abs=2e-5, rel=2e-5), name
    assert max((weights[name] - weight).abs().max() for name, weight in expected.items()) < 2e-6


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
    fall = 0.5 * COMMON["num_layers"] * (before["moe_z_loss"] - after["moe_z_loss"])
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
