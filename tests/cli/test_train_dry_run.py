"""`slime train --dry-run`: prints the plan and starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.cli.conftest import Slime, split

from slime.config import load_config
from slime.registry.plugin_set import load_plugins
from slime.run.checkpoint.save import CheckpointWriter


def test_the_plan_describes_the_run(dry_run: Slime, described_model: Path, prompts: Path) -> None:
    # Ports below those that the kernel and slime pick by themselves, so that nothing else has taken them.
    ended = dry_run(
        *split("--actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 --sequence-parallel --rollout-num-gpus 2"),
        *split("--router-port 19011 --engine-port 19012 --estimator.eps 0.001 --num-steps-per-rollout 2"),
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
        "2 SGLang engines x tensor parallel 1, ports 19012-19013",
        "1 router, port 19011",
        "4 training ranks: tensor 2 x pipeline 1 x context 1 x data 2, sequence parallel",
        "devices      cpu",
        "memory       a training rank: 0.7 MiB = weights 0.2 MiB + gradients 0.2 MiB + optimizer 0.2 MiB; in a step",
        "an engine: weights",
        "network      everything listens on 127.0.0.1",
        "Ray: ports chosen by Ray; key: a random token of this run; no dashboard",
        "engines: ports 19012-19013 of 127.0.0.1; key: random keys of this run",
        "router: port 19011 of 127.0.0.1; key: random keys of this run",
        "meeting points, gloo and NCCL: free ports of 127.0.0.1; no key (SECURITY.md)",
        "estimators/grpo  (slime-rl",
        "eps=0.001",
        "rewards/exact_match",
        "generators/single_turn",
        "datasources/prompts",
        "megatron     lr=0.0001, tensor_model_parallel_size=2, sequence_parallel=True",
        "sglang       log_level=info",
    ):
        assert part in text


def test_the_plan_names_addresses_ports_and_keys_of_a_cluster(dry_run: Slime) -> None:
    text = dry_run("--ray-address", "127.0.0.1:1").out
    assert "network      engines, router and ranks listen on their nodes' addresses, at free ports from 20000" in text
    assert "Ray: the cluster 127.0.0.1:1, its ports; key: RAY_AUTH_TOKEN or ~/.ray/auth_token" in text
    assert "engines: 1 free port from 20000 of the address of its node; key: random keys of this run" in text
    assert "router: 1 free port from 20000 of the address of the driver's node; key: random keys of this run" in text
    assert "gloo and NCCL: free ports of the address of its node; no key; close these ports to everybody" in text


def test_a_dry_run_writes_nothing(dry_run: Slime, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    assert dry_run().code == 0
    assert sorted(tmp_path.iterdir()) == before


def test_the_plan_shows_the_asynchronous_loop(dry_run: Slime) -> None:
    ended = dry_run("--async", "--async-buffer-size", "2")
    assert "(policy_loss, asynchronous, 2 rollouts ahead, weights synced every 1)" in ended.out


def test_the_plan_shows_that_no_engines_start(slime: Slime, described_model: Path, prompts: Path) -> None:
    words = split("--num-rollout 1 --rollout-batch-size 2 --lr 1 --loss-type sft_loss --save x --save-interval 3")
    ended = slime("train", "--dry-run", "--hf-checkpoint", str(described_model), "--prompt-data", str(prompts), *words)
    assert ended.code == 0, ended.err
    assert "no engines: the generator needs none" in ended.out
    assert "longest prompt 4 of at most 63 tokens" in ended.out
    assert "save every 3 rollouts and after the last to x" in ended.out


def test_save_interval_without_save_uses_the_run_folder(dry_run: Slime) -> None:
    assert "save every 5 rollouts and after the last to outputs/run/checkpoints" in dry_run("--save-interval", "5").out
    planned = dry_run("--save-interval", "5", "--async-save").out
    assert "after the last to outputs/run/checkpoints, in the background" in " ".join(planned.split())


def test_the_plan_shows_which_checkpoints_are_kept(dry_run: Slime) -> None:
    words = "--save-interval 5 --save-keep-last 3 --save-keep-every 10 --save-keep-best train/loss:min"
    planned = " ".join(dry_run(*words.split()).out.split())
    assert "keep the newest 3, those after multiples of 10 rollouts, the one with the lowest train/loss;" in planned


def test_options_without_effect_are_noted(dry_run: Slime) -> None:
    assert "notes        --eval-interval has no effect" in dry_run("--eval-interval", "5").out


@pytest.mark.parametrize("script", ["warm_start.toml", "grpo.toml"])
def test_the_quickstart_run_files_are_accepted(script: str) -> None:
    path = Path(__file__).parents[2] / "examples" / "quickstart" / script
    assert load_config([str(path), "--device", "cpu"]).num_rollout > 0


def saved_run(folder: Path, words: Sequence[str], rollouts_done: int) -> Path:
    """A checkpoint of a run with these arguments, without weights."""
    config = load_config(words)
    writer = CheckpointWriter(folder, config, load_plugins(config.plugins).provenance(config))
    return writer.commit(
        writer.begin(rollouts_done), {}, rollouts_done=rollouts_done, weight_version=2, trained_at={2: rollouts_done}
    )


def test_the_plan_of_a_resumed_run_shows_the_reference_weights(
    dry_run: Slime, base_words: Sequence[str], tmp_path: Path
) -> None:
    for name in ("saved", "first"):
        saved_run(tmp_path / name, base_words, 1)
    ended = dry_run("--load", "saved", "--initial-megatron-checkpoint", "first", "--num-rollout", "5")
    assert ended.code == 0, ended
    assert "continue from saved" in ended.out
    assert "a frozen reference has the weights of first" in ended.out


def test_a_resumed_run_is_compared_with_its_checkpoint(
    dry_run: Slime, base_words: Sequence[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_run(tmp_path / "saved", [*base_words, "--reward.ignore-case", "true"], 1)
    assert dry_run("--load", "saved", "--num-rollout", "5").code == 0
    assert "the checkpoint was made with reward rewards/exact_match with options" in caplog.text
    ended = dry_run("--load", "saved", "--num-rollout", "1")
    assert ended.code == 2
    assert "saved after 1 rollouts and --num-rollout is 1: nothing is left to do" in ended.err
    ended = dry_run("--load", "saved", "--num-rollout", "5", "--rollout-seed", "7")
    assert ended.code == 2
    assert "another data order" in ended.err


def test_the_plan_shows_weights_and_limits_of_rewards(slime: Slime, base_words: Sequence[str], tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('[[reward.terms]]\nname = "exact_match"\nweight = 0.25\ntimeout_s = 3\n')
    without_reward = [word for word in base_words if word not in ("--reward", "exact_match")]
    ended = slime("train", str(run), "--dry-run", *without_reward)
    assert ended.code == 0, ended
    [line] = [line for line in ended.out.splitlines() if "reward[0]" in line]
    assert "weight=0.25" in line and line.endswith("timeout_s=3.0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lr-warmup-iters 2", "the learning rate would warm up for 2 steps of 2 (--lr-decay-iters"),
        ("--lr-warmup-fraction 0.9 --num-steps-per-rollout 2", "warm up for 4 steps of 4"),
        ("--advantage-estimator ppo --num-critic-only-steps 1 --lr-warmup-iters 1", "warm up for 1 steps of 1"),
        ("--lr-decay-style linear --min-lr 1e-3", "--min-lr 0.001 is not between 0 and --lr 0.0001"),
        ("--lr 1e30", "--lr: got '1e30', expected at most 10"),
        ("--lr 1e6", "--lr: got '1e6', expected at most 10"),
        ("--entropy-coef 1e30", "--entropy-coef: got '1e30', expected at most 1000000"),
    ],
)
def test_a_learning_rate_that_no_run_can_have_is_refused_before_anything_starts(
    dry_run: Slime, words: str, message: str
) -> None:
    ended = dry_run(*split(words))
    assert ended.code == 2 and message in ended.err
