"""In float32, engine and trainer agree on the log-probs of trained tokens; else --true-on-policy-mode stops the run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.integration.in_house import train_in_house

from slime.engine.server import EngineServer

pytestmark = pytest.mark.engine


def flags_of(model: Path, data: Path, *, tolerance: str) -> list[str]:
    flags = ["--hf-checkpoint", str(model), "--prompt-data", str(data), "--lr", "1e-3", "--num-rollout", "3"]
    flags += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "96"]
    flags += ["--advantage-estimator", "grpo", "--reward", "exact_match", "--entropy-coef", "0.1"]
    return [*flags, "--true-on-policy-mode", "--true-on-policy-tolerance", tolerance]


@pytest.mark.row("A5")
def test_engine_and_trainer_agree_after_weight_updates(
    engine: EngineServer, model: Path, data: Path, tmp_path: Path
) -> None:
    rollouts = train_in_house(flags_of(model, data, tolerance="1e-4"), engine, tmp_path)
    assert len(rollouts) == 3
    for metrics in rollouts:
        assert metrics["grad_norm"] > 1e-3  # the weights move, so that the next rollout shows whether they arrived
        assert metrics["tokens"] > 8 * 8
        assert metrics["logprob_gap_max"] < 1e-4
        assert metrics["engine_ess"] > 0.9999


def test_a_tolerance_below_rounding_stops_the_run_with_the_worst_tokens(
    engine: EngineServer, model: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="rollout 0: engine and trainer disagree on the log-probs of") as caught:
        train_in_house(flags_of(model, data, tolerance="1e-12"), engine, tmp_path)
    rows = re.findall(
        r"^\s+(\d+)\s+(\d+)\s+(\d+)\s+(-[\d.]+)\s+(-[\d.]+)\s+[\d.]+e-\d+$", str(caught.value), re.MULTILINE
    )
    assert rows, caught.value
    for _, _, _, engine, trainer in rows:
        assert float(engine) == pytest.approx(float(trainer), abs=1e-4)
    assert "--sglang-enable-deterministic-inference" in str(caught.value)
