"""The trainer's own columns: by hand on one rank, and the same under every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_folders import Folders, model_folder, one_thread
from tests.train.harness import Centred, RankLauncher, make_batch, make_config, run_ranks

from slime.observe.logged_tokens import LoggedTokens
from slime.plugin import Advantages, EstimatorBatch, EstimatorSpec, TokenBatch
from slime.plugin.columns import BUILT_IN
from slime.rollout.train_batch import Ragged, TrainBatch

__all__ = ["model_folder", "one_thread"]
pytestmark = pytest.mark.engine

TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k1", "max_tokens_per_gpu": 45}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2": {},
    "tensor 2, sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline 2": {"pipeline_model_parallel_size": 2},
    "pipeline 2, virtual 2": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
    "context 2": {"context_parallel_size": 2},
}


class ByCredit:
    """The column `credit` where a token is trained on: shows what reached the estimator of each rank."""

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        pairs = zip(batch.columns["credit"], batch.loss_masks, strict=True)
        return Advantages([credit * mask for credit, mask in pairs])


class Doubting(Centred):
    """An objective that reports a number of each token."""

    def objective(self, tokens: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -tokens.log_ratio.exp() * tokens.advantages
        return loss, {"doubt": tokens.log_probs.detach() * 2, "doubt_max": loss.detach(), "clip_fraction": loss * 0}


def training(
    launcher: RankLauncher, config: Any, batches: list[TrainBatch], estimator: Any
) -> list[tuple[list[Any], dict[str, float], LoggedTokens | None]]:
    """Of each rollout: log-probs before it, its metrics, and what is logged of it."""
    rank = launcher.start(config, estimator, EstimatorSpec(name="centred", factory="tests:none"))
    if rank.reference is not None:
        with torch.no_grad():  # or there is no KL
            for held in rank.reference.tensors:
                held.mul_(1.05)
    found = []
    for batch in batches:
        before = rank.log_probs(batch)
        metrics = rank.train(batch)
        found.append((before, metrics, rank.logged_tokens()))
        assert rank.logged_tokens() is None  # handed over once
    rank.close()
    return found


def batches(steps: int = 2) -> list[TrainBatch]:
    return [make_batch(seed=seed, samples=9, steps=steps, group=3, rollout_log_probs=True) for seed in (1, 2)]


def flat(logged: LoggedTokens, parts: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([np.asarray(parts[i]) for i in logged.samples])


def one_step(folder: Path, estimator: Any = None, **options: Any) -> tuple[TrainBatch, Any, Any, LoggedTokens]:
    config = make_config(folder, **{**TERMS, "log_token_columns": "all", **options})
    [batch, _] = batches(1)
    [[(before, metrics, logged)]] = run_ranks(training, 1, config, [batch], estimator or Centred())
    assert logged is not None
    return batch, before, metrics, logged


def test_gap_ratio_and_clipping_by_hand(model_folder: Folders) -> None:
    """The engine's log-probs are the old ones, so the ratio is that of the trainer to the engine."""
    folder = model_folder("qwen3", tied=True, num_hidden_layers=2)
    batch, before, metrics, logged = one_step(folder, use_rollout_logprobs=True, eps_clip=0.1, eps_clip_high=0.3)
    columns, trained = logged.columns, flat(logged, batch.loss_masks) > 0
    assert sorted(logged.samples) == list(range(9))
    assert set(columns) == {"trainer_logprob", "entropy", "ratio", "clipped", "kl", "advantage", "ref_logprob"}
    assert all(len(column) == len(trained) and np.isnan(column[~trained]).all() for column in columns.values())

    trainer, engine = flat(logged, before)[trained], flat(logged, batch.rollout_log_probs)[trained]
    assert np.allclose(columns["trainer_logprob"][trained], trainer, atol=1e-5)
    ratio = np.exp(trainer - engine)
    assert np.allclose(columns["ratio"][trained], ratio, rtol=1e-4)
    means = {group: batch.rewards[batch.group_ids == group].mean() for group in set(batch.group_ids.tolist())}
    each = [
        np.full(length, batch.rewards[i] - means[int(batch.group_ids[i])])
        for i, length in enumerate(batch.response_lengths)
    ]
    advantage = flat(logged, each)[trained]
    assert np.allclose(columns["advantage"][trained], advantage, atol=1e-6)
    clipped = ((advantage > 0) & (ratio > 1.3)) | ((advantage < 0) & (ratio < 0.9))
    assert 0 < clipped.sum() < len(clipped)
    assert columns["clipped"][trained].tolist() == clipped.tolist()
    assert np.allclose(columns["kl"][trained], trainer - columns["ref_logprob"][trained], atol=1e-5)

    gap = np.abs(trainer - engine)
    by_hand = {"logprob_gap_mean": gap.mean(), "logprob_gap_max": gap.max(), "clip_fraction": clipped.mean()}
    assert {name: metrics[name] for name in by_hand} == pytest.approx(by_hand, rel=1e-4)
    names = {"entropy": "entropy", "ratio": "ratio", "kl": "kl", "advantage": "advantage_mean"}
    for name, metric in names.items():
        assert metrics[metric] == pytest.approx(float(columns[name][trained].mean()), rel=1e-4, abs=1e-6), name


def test_columns_that_an_objective_names_are_kept(model_folder: Folders) -> None:
    batch, before, _, logged = one_step(model_folder("qwen3", tied=True, num_hidden_layers=2), Doubting())
    trained = flat(logged, batch.loss_masks) > 0
    assert {"doubt"} <= set(logged.columns) <= {*BUILT_IN, "doubt"}
    assert np.allclose(logged.columns["doubt"][trained], 2 * flat(logged, before)[trained], atol=1e-5)
    assert (logged.columns["clipped"][trained] == 0).all()


def test_nothing_is_kept_if_nothing_is_logged(model_folder: Folders) -> None:
    config = make_config(model_folder("qwen3", tied=True, num_hidden_layers=2), log_token_columns="none", **TERMS)
    [[(_, _, logged)]] = run_ranks(training, 1, config, batches(1)[:1], Centred())
    assert logged is None


def test_supervised_training_logs_what_it_has(model_folder: Folders) -> None:
    folder = model_folder("qwen3", tied=True, num_hidden_layers=2)
    [batch, _] = batches(1)
    batch = replace(batch, rollout_log_probs=None)
    config = make_config(folder, loss_type="sft_loss", log_token_columns="all")
    [[(before, metrics, logged)]] = run_ranks(training, 1, config, [batch], None)
    assert logged is not None and set(logged.columns) == {"trainer_logprob", "entropy"}
    trained = flat(logged, batch.loss_masks) > 0
    assert np.allclose(logged.columns["trainer_logprob"][trained], flat(logged, before)[trained], atol=1e-5)
    assert metrics["entropy"] == pytest.approx(float(logged.columns["entropy"][trained].mean()), rel=1e-4)


#: MiB that four of the nine samples need
BUDGET = 0.003


def credited() -> list[TrainBatch]:
    rng = np.random.default_rng(5)
    return [
        replace(one, columns={"credit": Ragged.of([rng.normal(size=n) for n in one.response_lengths], np.float32)})
        for one in batches()
    ]


@cache
def on_one_rank(folder: Path) -> Any:
    config = make_config(folder, steps=2, log_token_columns_mib=BUDGET, **TERMS)
    return run_ranks(training, 1, config, credited(), ByCredit())[0]


@pytest.mark.parametrize(
    "layout", [name if name == "data 2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_every_layout_logs_the_same_and_keeps_the_columns_of_plugins(layout: str, model_folder: Folders) -> None:
    folder = model_folder("qwen3", tied=True, num_hidden_layers=4)
    config = make_config(
        folder, world_size=2, steps=2, log_token_columns_mib=BUDGET, megatron=dict(LAYOUTS[layout]), **TERMS
    )
    mine, other = run_ranks(training, 2, config, credited(), ByCredit())
    assert [logged for _, _, logged in other] == [None, None]
    for (_, _, got), (_, _, expected), batch in zip(mine, on_one_rank(folder), credited(), strict=True):
        assert 0 < len(expected.samples) < 9
        assert (got.samples, got.flags, got.steps) == (expected.samples, expected.flags, expected.steps)
        assert got.steps == [int(batch.step_ids[i]) for i in got.samples]
        assert got.columns.keys() == expected.columns.keys()
        trained = flat(got, batch.loss_masks) > 0
        assert got.columns["advantage"][trained].tobytes() == flat(got, batch.columns["credit"])[trained].tobytes()
        for name in got.columns:
            assert np.allclose(got.columns[name], expected.columns[name], rtol=1e-4, atol=2e-5, equal_nan=True), name
