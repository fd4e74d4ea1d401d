"""A run with a critic from end to end: warm-up, training, checkpoint and resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import SlimeRun

pytestmark = [pytest.mark.engine, pytest.mark.slow]

#: a random model never gives a correct answer, but it does write letters
REWARD = """
def letters(samples):
    return [sum(c.isalpha() for c in sample.response) / 10 for sample in samples]
"""


def test_a_run_with_a_critic_warms_it_up_trains_saves_and_resumes(
    slime_train: Callable[..., SlimeRun], tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    flags = [
        "--advantage-estimator", "ppo", "--custom-rm-path", "reward.py:letters", "--num-critic-only-steps", "1",
        "--critic-lr", "5e-3", "--save", "ckpt", "--save-interval", "2",
    ]  # fmt: skip
    whole = slime_train("--num-rollout", "3", *flags, name="whole", reward=False)
    assert whole.wait() == 0, whole.output
    first, second, third = whole.steps()
    assert "train/loss" not in first and "train/grad_norm" not in first
    assert first["train/value_mean"] == 0.0 and first["train/critic_grad_norm"] > 1e-3
    assert first["train/return_mean"] > 0.05 and first["train/return_std"] > 1e-3
    assert second["train/value_mean"] != 0.0 and second["train/grad_norm"] > 1e-3
    assert second["train/critic_lr"] == 5e-3 and second["train/lr"] == 1e-3
    assert third["train/logprob_gap_max"] < 1e-4

    resumed = slime_train("--num-rollout", "3", *flags, "--load", "ckpt/rollout_000002", name="resumed", reward=False)
    assert resumed.wait() == 0, resumed.output
    assert [row["step"] for row in resumed.steps()] == [0, 1, 2]  # the curve of the first run goes on
    (again,) = resumed.steps(2)
    for name in (
        "value_loss",
        "value_mean",
        "return_std",
        "critic_grad_norm",
        "loss",
        "grad_norm",
        "explained_variance",
    ):
        assert again[f"train/{name}"] == pytest.approx(third[f"train/{name}"], rel=1e-4), name
