"""The default learning rate, and the schedule in optimizer steps."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from tests.config.conftest import Load

from slime.config import RunConfig, load_config
from slime.config.learning_rate import continued_at, learning_rate_problems
from slime.config.options import AlgorithmOptions, RolloutOptions
from slime.train.optimizer import build_scheduler


def test_the_default_is_part_of_the_saved_configuration() -> None:
    words = "--hf-checkpoint m --prompt-data d --num-rollout 1 --rollout-batch-size 4 --loss-type sft_loss".split()  # noqa: SIM905
    config = load_config(words)
    assert config.megatron["lr"] == 1e-6
    assert "lr = 1e-06" in config.to_toml()
    assert load_config([*words, "--lr", "0.5"]).megatron["lr"] == 0.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lr-warmup-iters 3", "warm up for 3 steps of 3"),
        ("--lr-warmup-iters 20", "warm up for 20 steps of 3"),
        ("--lr-warmup-iters 6 --num-steps-per-rollout 2", "warm up for 6 steps of 6"),
        ("--lr-warmup-iters 7 --lr-decay-iters 7 --lr-decay-style linear", "warm up for 7 steps of 7"),
        ("--lr-warmup-fraction 0.9", "warm up for 3 steps of 3"),
        ("--lr-warmup-iters 1 --lr-warmup-fraction 0.1", "exclude each other"),
        ("--lr-decay-style linear --min-lr 1e-3", "--min-lr 0.001 is not between 0 and --lr 1e-06"),
        ("--decoupled-lr 1e-5 --decoupled-min-lr 1e-3", "--decoupled-min-lr 0.001 is not between 0 and --decoupled-lr"),
        ("--lr-warmup-iters 2", None),
        ("--lr-warmup-iters 20 --lr-decay-iters 21 --lr-decay-style cosine", None),
        ("--num-rollout 0 --lr-warmup-iters 5", None),
    ],
)
def test_a_schedule_that_contradicts_itself_is_a_problem(load: Load, words: str, message: str | None) -> None:
    found = list(learning_rate_problems(load(*words.split()), with_critic=False))
    assert len(found) == (message is not None) and all(str(message) in one for one in found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-critic-only-steps 1 --lr-warmup-iters 2", "warm up for 2 steps of 2"),
        ("--lr-decay-style linear --min-lr 1e-6 --critic-lr 1e-7", "--min-lr 1e-06 is not between 0 and --critic-lr"),
        ("--num-critic-only-steps 1 --lr-warmup-iters 1 --critic-lr 1e-5", None),
    ],
)
def test_the_schedules_of_policy_and_critic_are_both_checked(load: Load, words: str, message: str | None) -> None:
    found = list(learning_rate_problems(load(*words.split()), with_critic=True))
    assert len(found) == (message is not None) and all(str(message) in one for one in found)


def saved(rollouts_done: int, steps: int, critic_only: int = 0) -> tuple[RunConfig, int]:
    """A run with so many steps a rollout, and how many rollouts of it were done."""
    rollout = RolloutOptions(rollout_batch_size=steps, num_steps_per_rollout=steps)
    algorithm = AlgorithmOptions(num_critic_only_steps=critic_only)
    return RunConfig(rollout=rollout, algorithm=algorithm), rollouts_done


LINEAR = "--num-rollout 100 --lr-decay-style linear"


@pytest.mark.parametrize(
    ("words", "before", "count", "waits", "place"),
    [
        # 256 samples a rollout; half of the run is done, whatever the steps are now
        (LINEAR, saved(50, 1), 50, False, 50),
        (f"{LINEAR} --global-batch-size 128", saved(50, 1), 50, False, 100),
        (f"{LINEAR} --global-batch-size 256", saved(50, 2), 100, False, 50),
        (f"{LINEAR} --num-steps-per-rollout 8", saved(50, 2), 100, False, 400),
        (f"{LINEAR} --rollout-batch-size 64 --global-batch-size 256", saved(50, 1), 50, False, 100),
        (f"{LINEAR} --n-samples-per-prompt 16 --global-batch-size 256", saved(50, 1), 50, False, 100),
        # more or fewer rollouts change what follows, and not what was done
        ("--num-rollout 200 --lr-decay-style linear", saved(50, 1), 50, False, 50),
        # what is stated in steps counts steps
        (f"{LINEAR} --lr-decay-iters 80 --num-steps-per-rollout 2", saved(50, 1), 50, False, 50),
        (f"{LINEAR} --lr-warmup-iters 20 --num-steps-per-rollout 4", saved(5, 1), 5, False, 5),
        (f"{LINEAR} --lr-warmup-iters 20 --num-steps-per-rollout 4", saved(20, 1), 20, False, 80),
        # a second change, and a run that was continued within its warm-up, keep their place
        (f"{LINEAR} --num-steps-per-rollout 4", saved(50, 4), 185, False, 185),
        (f"{LINEAR} --num-steps-per-rollout 2", saved(50, 4), 200, False, 100),
        # a policy waits for its critic, which does not
        (f"{LINEAR} --num-steps-per-rollout 2 --num-critic-only-steps 10", saved(30, 1, 10), 20, True, 40),
        (f"{LINEAR} --num-steps-per-rollout 2 --num-critic-only-steps 10", saved(30, 1, 10), 30, False, 60),
        (f"{LINEAR} --num-critic-only-steps 40", saved(30, 1, 10), 20, True, 0),
        (f"{LINEAR} --num-critic-only-steps 0", saved(30, 1, 10), 20, True, 30),
    ],
)
def test_a_resumed_run_goes_on_at_its_place_in_the_schedule(
    load: Load, words: str, before: tuple[RunConfig, int], count: int, waits: bool, place: int
) -> None:
    assert continued_at(load(*words.split()), *before, count, waits=waits) == place


def rates(config: RunConfig, at: int, steps: int) -> list[float]:
    """The learning rates of the steps from `at` on."""
    optimizer: Any = SimpleNamespace(param_groups=[{}])
    settings: Any = SimpleNamespace(optimizer=SimpleNamespace(lr=1.0, min_lr=0.1, weight_decay=0.0))
    scheduler = build_scheduler(config, settings, optimizer)
    scheduler.step(increment=at)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=1)
    return found


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_with_half_the_batch_the_rate_goes_on_where_it_was_and_ends_at_the_least(load: Load, style: str) -> None:
    words = ["--num-rollout", "100", "--lr-decay-style", style, "--min-lr", "1e-7"]
    config = load(*words, "--global-batch-size", "128")
    place = continued_at(config, *saved(60, 1), 60)
    second = rates(config, place, 81)
    share = 0.4 if style == "linear" else (1 + math.cos(0.6 * math.pi)) / 2
    assert second[0] == pytest.approx(0.1 + 0.9 * share)
    assert second[80] == pytest.approx(0.1) and min(second[:80]) > 0.1
