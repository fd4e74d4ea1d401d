"""A run with filters that is killed and resumed trains on the same prompts as an uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import SlimeRun

pytestmark = [pytest.mark.engine, pytest.mark.slow]
Start = Callable[..., SlimeRun]

#: a random model never gives a correct answer, so this reward is random
REWARD = "def reward_func(args, sample):\n    return float(sum(sample.tokens) % 2)\n"


def test_a_killed_run_with_dropped_groups_trains_on_the_prompts_of_an_uninterrupted_one(
    slime_train: Start, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    flags = ["--sampling-filter", "nonzero_variance", "--custom-rm-path", "reward.py", "--num-rollout", "4"]
    flags += ["--advantage-estimator", "grpo"]
    whole = slime_train(*flags, name="whole", reward=False)
    assert whole.wait() == 0, whole.output
    first = slime_train(*flags, "--save", "ckpt", "--save-interval", "2", name="first", reward=False)
    first.wait_until((first.root / "ckpt" / "latest").exists)
    first.process.kill()
    first.process.wait(60)
    assert first.left_over() == []
    second = slime_train(*flags, "--load", "ckpt", name="second", reward=False)
    assert second.wait() == 0, second.output

    assert sum(row.get("rollout/dropped/zero_variance", 0) for row in whole.steps()) > 0
    assert [row["step"] for row in second.steps()] == [0, 1, 2, 3]  # the curve of the first run goes on
    assert [first.prompts(i) for i in (0, 1)] + [second.prompts(i) for i in (2, 3)] == [
        whole.prompts(i) for i in range(4)
    ]
    for resumed, uninterrupted in zip(second.steps(2), whole.steps()[2:], strict=True):
        for name in ("rollout/groups_generated", "rollout/buffer_size", "rollout/reward_mean", "rollout/age_max"):
            assert resumed[name] == uninterrupted[name], name
