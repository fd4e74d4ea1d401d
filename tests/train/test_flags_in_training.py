"""The options that are listed as moving a number move one in a real trainer, and those listed as neutral move none."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from tests.support.model_folders import Folders
from tests.train.flag_cases import MOVES, NEUTRAL, NOT_TOGETHER
from tests.train.harness import RankLauncher, make_batch, make_config, run_ranks
from tests.train.test_every_flag import FLAGS, another_value

from slime.config import resolve
from slime.config.megatron_effects import matches
from slime.engine.ports import free_port

Numbers = dict[str, float | str]


def numbers_of_all(_: RankLauncher, cases: list[Any]) -> list[Numbers]:
    """Metrics and a digest of the weights after two rollouts of two steps, of each case, one after the other."""
    from slime.registry.plugin_set import load_plugins
    from slime.run.trainer import build_estimator

    found: list[Numbers] = []
    batches = [make_batch(seed=seed, steps=2, rollout_log_probs=True, masked=False) for seed in (0, 1)]
    for config in cases:
        plugins = load_plugins(config.plugins)
        rank = RankLauncher(0, 1, free_port()).start(config, *build_estimator(config, Path(), plugins))
        numbers: Numbers = {}
        for number, batch in enumerate(batches):
            metrics = rank.train(batch)
            numbers |= {f"{number}/{name}": value for name, value in metrics.items() if "time" not in name}
        vocabulary = rank._architecture.gpt["vocab_size"]
        digest = hashlib.sha256()
        for chunk in rank.policy.chunks:
            for parameter in chunk.parameters():
                digest.update(parameter.detach().float()[:vocabulary].numpy().tobytes())
        found.append(numbers | {"weights": digest.hexdigest()})
        rank.close()
    return found


def config_with(folder: Path, megatron: dict[str, Any]) -> Any:
    algorithm = {"advantage_estimator": "grpo", "reward": "exact_match", "n_samples_per_prompt": 4, "num_rollout": 4}
    return resolve(
        make_config(
            folder,
            steps=2,
            megatron=megatron,
            **algorithm | {"rollout_batch_size": 2, "num_steps_per_rollout": 2},
        )
    )


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_every_flag_moves_a_number_or_is_listed_as_neutral(model_folder: Folders) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    folder = model_folder("qwen3", **sizes)
    neutral = {
        key: another_value(FLAGS[key])
        for key in FLAGS
        for names, _ in NEUTRAL
        if matches(key, names) and key not in NOT_TOGETHER
    }
    neutral["make_vocab_size_divisible_by"] = 100  # the vocabulary is a multiple of smaller numbers already
    cases: dict[str, Any] = {"base": config_with(folder, {}), "neutral": config_with(folder, neutral)}
    pairs: dict[str, str] = {}
    for key, (value, beside) in MOVES.items():
        plain = f"base {sorted(beside.items())}" if beside else "base"
        cases.setdefault(plain, config_with(folder, beside))
        cases[key], pairs[key] = config_with(folder, beside | {key: value}), plain
    cases["base again"] = config_with(folder, {})
    [found] = run_ranks(numbers_of_all, 1, list(cases.values()), timeout_s=800)
    numbers = dict(zip(cases, found, strict=True))

    assert numbers["base again"] == numbers["base"], "cases influence each other"
    for name, value in numbers["base"].items():
        if name != "weights":  # other shapes and kernels round differently
            assert numbers["neutral"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    unmoved = [key for key, plain in pairs.items() if same(numbers[key], numbers[plain])]
    assert not unmoved, f"no number depends on {unmoved}"


def same(ours: Numbers, theirs: Numbers) -> bool:
    """Whether all numbers are equal; NaN equals NaN."""
    return {name: str(value) for name, value in ours.items()} == {name: str(value) for name, value in theirs.items()}
