"""Engine and trainer agree on the log-probs of what is trained on, in float32; a run that asks stops where not."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from tests.integration.conftest import SlimeRun

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]
Start = Callable[..., SlimeRun]


def test_engine_and_trainer_agree_after_the_weights_have_moved_and_come_back(slime_train: Start) -> None:
    run = slime_train(
        "--num-rollout", "3", "--rollout-max-response-len", "96", "--true-on-policy-mode",
        "--true-on-policy-tolerance", "1e-4",
    )  # fmt: skip
    assert run.wait() == 0, run.output
    steps = run.steps()
    assert len(steps) == 3
    for row in steps:
        assert row["train/grad_norm"] > 1e-3  # the weights move, so that the next rollout shows whether they arrived
        assert row["train/tokens"] > 8 * 8
        assert row["train/logprob_gap_max"] < 1e-4
        assert row["train/engine_ess"] > 0.9999


def test_a_tolerance_below_rounding_stops_the_run_with_the_worst_tokens(slime_train: Start) -> None:
    run = slime_train("--num-rollout", "2", "--true-on-policy-mode", "--true-on-policy-tolerance", "1e-12")
    assert run.wait() != 0
    assert "rollout 0: engine and trainer disagree on the log-probs of" in run.output
    rows = re.findall(r"^\s+(\d+)\s+(\d+)\s+(\d+)\s+(-[\d.]+)\s+(-[\d.]+)\s+[\d.]+e-\d+$", run.output, re.MULTILINE)
    assert rows, run.output
    for _, _, _, engine, trainer in rows:
        assert float(engine) == pytest.approx(float(trainer), abs=1e-4)
    assert "--sglang-enable-deterministic-inference" in run.output
    assert not run.steps(), "nothing was trained"
    assert run.left_over() == []
