"""rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""

from __future__ import annotations

import pytest
from tests.config.conftest import Load, Refused


@pytest.mark.parametrize(
    ("words", "per_step", "steps"),
    [
        ("", 256, 1),
        ("--num-steps-per-rollout 4", 64, 4),
        ("--global-batch-size 64", 64, 4),
        ("--global-batch-size 64 --num-steps-per-rollout 4", 64, 4),
    ],
)
def test_missing_batch_options_follow_from_the_others(load: Load, words: str, per_step: int, steps: int) -> None:
    config = load(*words.split())
    assert (config.batch.samples_per_step, config.batch.steps) == (per_step, steps)
    assert config.rollout.global_batch_size == per_step
    assert config.rollout.num_steps_per_rollout == steps
    assert config.batch.samples == 256


@pytest.mark.row("L5")
def test_batch_sizes_that_do_not_match_are_refused_with_the_numbers(refused: Refused) -> None:
    message = refused("--global-batch-size", "100", "--num-steps-per-rollout", "2")
    assert "--rollout-batch-size 32 x --n-samples-per-prompt 8 = 256 samples per rollout" in message
    assert "--global-batch-size 100 x --num-steps-per-rollout 2 = 200" in message


def test_steps_that_do_not_divide_are_refused_with_the_numbers(refused: Refused) -> None:
    assert "= 256 samples per rollout, which --num-steps-per-rollout 3 does not divide" in refused(
        "--num-steps-per-rollout", "3"
    )
    assert "= 256 samples per rollout, which --global-batch-size 100 does not divide" in refused(
        "--global-batch-size", "100"
    )
