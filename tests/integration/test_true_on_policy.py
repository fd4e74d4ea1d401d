"""In float32, engine and trainer agree on the log-probs of trained tokens; else --true-on-policy-mode stops the run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import SlimeRun
from tests.integration.in_house import train_in_house

from slime.engine.server import EngineServer

pytestmark = pytest.mark.engine
Start = Callable[..., SlimeRun]


@pytest.mark.row("A5")
def test_engine_and_trainer_agree_after_weight_updates(
    engine: EngineServer, model: Path, data: Path, tmp_path: Path
) -> None:
    flags = ["--hf-checkpoint", str(model), "--prompt-data", str(data), "--lr", "1e-3", "--num-rollout", "3"]
    flags += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "96"]
    flags += ["--advantage-estimator", "grpo", "--reward", "exact_match", "--entropy-coef", "0.1"]
    flags += ["--true-on-policy-mode", "--true-on-policy-tolerance", "1e-4"]
    rollouts = train_in_house(flags, engine, tmp_path)
    assert len(rollouts) == 3
    for metrics in rollouts:
        assert metrics["grad_norm"] > 1e-3  # the weights move, so that the next rollout shows whether they arrived
        assert metrics["tokens"] > 8 * 8
        assert metrics["logprob_gap_max"] < 1e-4
        assert metrics["engine_ess"] > 0.9999


@pytest.mark.slow
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
