"""`slime train --dry-run`: the plan, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Slime, split


def test_the_plan_tells_what_would_run(dry_run: Slime, described_model: Path, prompts: Path) -> None:
    ended = dry_run(
        *split("--actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 --sequence-parallel --rollout-num-gpus 2"),
        *split("--router-port 39011 --engine-port 39012 --estimator.eps 0.001 --num-steps-per-rollout 2"),
        *("--eval-prompt-data", "held_out", str(prompts), "--eval-interval", "5", "--sglang-log-level", "info"),
    )
    assert ended.code == 0, ended.err
    text = ended.out
    for part in (
        "run folder   outputs/run",
        f"model        {described_model}: llama, 3 layers of 64, 4 heads, vocabulary 128, context 64",
        "batch        4 prompts x 2 samples = 8 samples = 4 per step x 2 steps",
        "2 rollouts = 4 optimizer steps (policy_loss, synchronous)",
        f"data         training: {prompts}: 3 rows, longest prompt 4 of at most 56 tokens",
        "evaluation   held_out: before the first, every 5 and after the last rollout, 1 response a prompt",
        "2 SGLang engines x tensor parallel 1, ports 39012-39013",
        "1 router, port 39011",
        "4 training ranks: tensor 2 x pipeline 1 x context 1 x data 2, sequence parallel",
        "devices      cpu",
        "estimators/grpo  (slime-rl",
        "eps=0.001",
        "rewards/exact_match",
        "generators/single_turn",
        "datasources/prompts",
        "megatron     lr=0.0001, tensor_model_parallel_size=2, sequence_parallel=True",
        "sglang       log_level=info",
    ):
        assert part in text


def test_a_dry_run_writes_nothing(dry_run: Slime, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    assert dry_run().code == 0
    assert sorted(tmp_path.iterdir()) == before


def test_the_asynchronous_loop_is_told(dry_run: Slime) -> None:
    ended = dry_run("--async", "--async-buffer-size", "2")
    assert "(policy_loss, asynchronous, 2 rollouts ahead, weights synced every 1)" in ended.out


def test_a_run_without_engines_is_told(slime: Slime, described_model: Path, prompts: Path) -> None:
    words = split("--num-rollout 1 --rollout-batch-size 2 --lr 1 --loss-type sft_loss --save x --save-interval 3")
    ended = slime("train", "--dry-run", "--hf-checkpoint", str(described_model), "--prompt-data", str(prompts), *words)
    assert ended.code == 0, ended.err
    assert "no engines: the generator needs none" in ended.out
    assert "longest prompt 4 of at most 63 tokens" in ended.out
    assert "save every 3 rollouts and after the last to x" in ended.out


def test_an_interval_alone_saves_in_the_run_folder(dry_run: Slime) -> None:
    assert "save every 5 rollouts and after the last to outputs/run/checkpoints" in dry_run("--save-interval", "5").out


def test_what_has_no_effect_is_noted(dry_run: Slime) -> None:
    assert "notes        --eval-interval has no effect" in dry_run("--eval-interval", "5").out


@pytest.mark.parametrize("script", ["warm_start.toml", "grpo.toml"])
def test_the_quickstart_files_are_understood(script: str) -> None:
    from slime.config import load_config

    path = Path(__file__).parents[2] / "examples" / "quickstart" / script
    assert load_config([str(path), "--device", "cpu"]).num_rollout > 0


def test_a_continued_run_says_which_weights_its_reference_has(dry_run: Slime, tmp_path: Path) -> None:
    for name in ("saved", "first"):
        (tmp_path / name).mkdir()
        state = {"format": 2, "rollouts_done": 1, "weight_version": 2, "trained_at": [], "data_order": {}}
        (tmp_path / name / "state.json").write_text(json.dumps(state))
        (tmp_path / name / "plugins.json").write_text("{}")
    ended = dry_run("--load", "saved", "--initial-megatron-checkpoint", "first")
    assert ended.code == 0, ended
    assert "continue from saved" in ended.out
    assert "a frozen reference has the weights of first" in ended.out
