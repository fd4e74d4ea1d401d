"""Loss, gradients and training do not depend on the parallel layout or on micro-batching."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.support.model_folders import Folders
from tests.train.harness import Centred, RankLauncher, make_batch, make_config, run_ranks

from slime.plugin import EstimatorSpec
from slime.rollout.train_batch import TrainBatch

PP = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor 2": (2, {"tensor_model_parallel_size": 2}),
    "tensor 2, sequence": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pipeline 2": (2, PP),
    "pipeline 2, virtual 2": (2, PP | {"num_layers_per_virtual_pipeline_stage": 1}),
    "data 2": (2, {}),
    "data 2, overlapped": (
        2,
        {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000},
    ),
    "context 2": (2, {"context_parallel_size": 2}),
}
#: settings that would reveal a padded, masked or repeated token: ragged lengths, masks, shared rollouts, KL, entropy
TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "entropy_coef": 0.1, "kl_coef": 0.1}


#: loss modes: options, and the level of the ratio
MODES: dict[str, tuple[dict[str, Any], Literal["token", "sequence"]]] = {
    "mean over rollouts": ({}, "token"),
    "mean over tokens": ({"calculate_per_token_loss": True}, "token"),
    "constant length": ({"loss_constant_length": 16}, "token"),
    "sequences": (
        {
            "normalize_advantages": True,
            "off_policy_correction": "truncate",
            "off_policy_level": "geometric",
            "use_unbiased_kl": True,
            "eps_clip_c": 3.0,
        },
        "sequence",
    ),
}


def config_for(folder: Path, layout: str | None, **options: Any) -> Any:
    world_size, sizes = LAYOUTS[layout] if layout else (1, {})
    megatron = sizes | options.pop("megatron", {})
    options = {"max_tokens_per_gpu": 45} | TERMS | options
    return make_config(folder, world_size=world_size, megatron=megatron, **options)


def gradients(
    launcher: RankLauncher, config: Any, batch: TrainBatch, *modes: str
) -> dict[str, tuple[dict[str, float], Any]]:
    """Of each mode: metrics, and on rank 0 the full gradients of one step under Hugging Face names.

    config   without the distributed optimizer, with which no rank has whole gradients
    """
    rank = start_without_steps(launcher, config)
    own = [parameter.data.clone() for chunk in rank.policy.chunks for parameter in chunk.parameters()]
    answers = {}
    for mode in modes:
        options, ratio = MODES[mode]
        rank.learner.config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update=options)})
        rank.learner.spec = EstimatorSpec(name="centred", factory="tests:none", ratio=ratio)
        metrics = rank.train(batch)
        answers[mode] = metrics, put_gradients_in_weights(rank)
        parameters = [parameter for chunk in rank.policy.chunks for parameter in chunk.parameters()]
        for parameter, values in zip(parameters, own, strict=True):
            parameter.data.copy_(values)
    rank.close()
    return answers


def start_without_steps(launcher: RankLauncher, config: Any) -> Any:
    """A rank whose optimizer changes nothing. Its reference is not the policy, so that KL has a gradient."""
    rank = launcher.start(config, Centred(kl_coef=0.2))
    rank.policy.optimizer.step = lambda: (True, 0.0, None)
    with torch.no_grad():
        for held in rank.reference.tensors:
            held.mul_(1.05)
    return rank


def put_gradients_in_weights(rank: Any) -> dict[str, torch.Tensor]:
    """On rank 0, the full gradients under Hugging Face names, for which the weights are overwritten with them."""
    for chunk in rank.policy.chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
    return {name: tensor.clone() for name, tensor in rank.named_hf_weights()}


def whole_gradients(folder: Path, layout: str | None, *modes: str, **options: Any) -> list[Any]:
    """`gradients` on each rank of a layout."""
    config = config_for(folder, layout, megatron={"use_distributed_optimizer": False}, **options)
    return run_ranks(gradients, LAYOUTS[layout][0] if layout else 1, config, gradient_batch(), *modes)


def gradient_batch() -> TrainBatch:
    return make_batch(samples=9, rollout_log_probs=True)


def training(launcher: RankLauncher, config: Any, batches: list[TrainBatch]) -> tuple[list[dict[str, float]], Any, Any]:
    """Metrics of each rollout, log-probs and, on rank 0, the weights at the end."""
    rank = launcher.start(config, Centred(kl_coef=0.2))
    metrics = [rank.train(batch) for batch in batches]
    log_probs = rank.log_probs(batches[0])
    full = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    rank.close()
    return metrics, log_probs, full


@cache
def one_rank_gradients(folder: Path) -> dict[str, tuple[dict[str, float], dict[str, torch.Tensor]]]:
    return whole_gradients(folder, None, *MODES)[0]


@cache
def one_rank_training(folder: Path) -> Any:
    return run_ranks(training, 1, config_for(folder, None), batches())[0]


def batches() -> list[TrainBatch]:
    return [make_batch(seed=seed, samples=9, steps=2, group=3, rollout_log_probs=True) for seed in (1, 2)]


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def assert_close(got: dict[str, float], expected: dict[str, float], skip: tuple[str, ...] = ()) -> None:
    assert set(got) == set(expected)
    for name in set(got) - set(skip):
        assert got[name] == pytest.approx(expected[name], abs=2e-5, rel=2e-5), name


@pytest.mark.engine
@pytest.mark.parametrize("layout", ["tensor 2, sequence", "pipeline 2, virtual 2", "data 2", "context 2"])
@pytest.mark.row("N3")
def test_loss_and_gradients_equal_those_of_one_rank(layout: str, model_folder: Folders) -> None:
    folder = model_folder("qwen3", tied=True, num_hidden_layers=4)
    expected = one_rank_gradients(folder)
    answers = whole_gradients(folder, layout, *MODES)
    for mode, (expected_metrics, expected_gradients) in expected.items():
        for answer in answers:
            assert_close(untimed(answer[mode][0]), untimed(expected_metrics), skip=("micro_batches",))
        got = answers[0][mode][1]
        assert set(got) == set(expected_gradients)
        for name, gradient in expected_gradients.items():
            assert gradient.abs().max() > 1e-4, name
            assert (got[name] - gradient).abs().max() < 1e-5, (mode, name)


@pytest.mark.engine
@pytest.mark.row("A3")
def test_every_loss_mode_has_a_different_gradient(model_folder: Folders) -> None:
    """Otherwise the comparison of layouts would compare the same mode four times."""
    answers = one_rank_gradients(model_folder("qwen3", tied=True, num_hidden_layers=4))
    found = [gradients["model.norm.weight"] for _, gradients in answers.values()]
    for number, one in enumerate(found):
        assert all((one - other).abs().max() > 1e-3 for other in found[:number])


@pytest.mark.engine
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_that_of_one_rank(layout: str, model_folder: Folders) -> None:
    folder = model_folder("qwen3", tied=True, num_hidden_layers=4)
    expected_metrics, expected_log_probs, expected = one_rank_training(folder)
    answers = run_ranks(training, LAYOUTS[layout][0], config_for(folder, layout), batches())
    for metrics, log_probs, _ in answers:
        for got, want in zip(metrics, expected_metrics, strict=True):
            assert_close(untimed(got), untimed(want), skip=("micro_batches",))
        assert untimed(metrics[-1]) == untimed(answers[0][0][-1])
        assert max(np.abs(a - b).max() for a, b in zip(log_probs, expected_log_probs, strict=True)) < 2e-4
    for name, weight in expected.items():
        assert (answers[0][2][name] - weight).abs().max() < 2e-4, name


@pytest.mark.engine
@pytest.mark.parametrize(
    "budget",
    [{"micro_batch_size": 3}, {"max_tokens_per_gpu": 10}],
    ids=str,
)
def test_micro_batching_does_not_change_loss_or_gradients(budget: dict[str, int], model_folder: Folders) -> None:
    folder = model_folder("qwen3", tied=True, num_hidden_layers=4)
    modes = ("mean over rollouts", "sequences")
    (answer,) = whole_gradients(folder, None, *modes, **budget)
    for mode in modes:
        (metrics, got), (expected_metrics, expected) = answer[mode], one_rank_gradients(folder)[mode]
        assert metrics["micro_batches"] != expected_metrics["micro_batches"]
        assert_close(untimed(metrics), untimed(expected_metrics), skip=("micro_batches",))
        for name, gradient in expected.items():
            assert (got[name] - gradient).abs().max() < 1e-5, name


@pytest.mark.engine
@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_activations": True},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
    ids=["selective", "full"],
)
def test_recomputed_activations_do_not_change_gradients(recompute: dict[str, Any], model_folder: Folders) -> None:
    folder = model_folder("qwen3", tied=True, num_hidden_layers=4)
    mode = "mean over rollouts"
    expected_metrics, expected = one_rank_gradients(folder)[mode]
    config = config_for(folder, None, megatron={"use_distributed_optimizer": False} | recompute)
    (answer,) = run_ranks(gradients, 1, config, gradient_batch(), mode)
    metrics, got = answer[mode]
    assert_close(untimed(metrics), untimed(expected_metrics))
    for name, gradient in expected.items():
        assert (got[name] - gradient).abs().max() < 1e-6, name


@pytest.mark.engine
def test_half_precision_trains_near_single_precision(model_folder: Folders) -> None:
    folder = model_folder("qwen3", tied=True, num_hidden_layers=4)
    expected_metrics, expected, _ = one_rank_training(folder)
    config = config_for(folder, "tensor 2, sequence", megatron={"bf16": True})
    metrics, log_probs, weights = run_ranks(training, 2, config, batches())[0]
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert metrics[0]["entropy"] == pytest.approx(expected_metrics[0]["entropy"], rel=2e-2)
    assert metrics[0]["grad_norm"] == pytest.approx(expected_metrics[0]["grad_norm"], rel=5e-2)
    assert max(np.abs(a - b).mean() for a, b in zip(log_probs, expected, strict=True)) < 0.1


def threads(launcher: RankLauncher, config: Any) -> int:
    launcher.start(config, Centred())
    return torch.get_num_threads()


@pytest.mark.engine
def test_ranks_on_one_machine_share_its_cores(model_folder: Folders) -> None:
    folder = model_folder("qwen3", tied=True)
    # As if there were two machines of one rank each: what counts is where the ranks are.
    config = make_config(folder, world_size=2, threads_per_rank=None, actor_num_nodes=2, actor_num_gpus_per_node=1)
    assert run_ranks(threads, 2, config) == [max(1, len(os.sched_getaffinity(0)) // 2)] * 2
