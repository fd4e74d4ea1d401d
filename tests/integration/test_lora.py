"""A policy that trains adapters: engines get merged weights, and the reference is the model without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.in_house import train_in_house

from slime.engine.server import EngineServer

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.row("N6")
def test_the_engine_computes_with_merged_adapters(
    engine: EngineServer, model: Path, data: Path, tmp_path: Path
) -> None:
    flags = ["--hf-checkpoint", str(model), "--prompt-data", str(data), "--lr", "1e-2", "--num-rollout", "3"]
    flags += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"]
    flags += ["--advantage-estimator", "grpo", "--reward", "exact_match", "--entropy-coef", "0.1"]
    flags += ["--use-kl-loss", "--kl-loss-coef", "0.01", "--check-weight-update-equal", "--lora-rank", "4"]
    flags += ["--lora-alpha", "8", "--lora-targets", "q_proj", "v_proj", "gate_proj", "down_proj"]
    steps = train_in_house(flags, engine, tmp_path)
    for step in steps:
        assert step["grad_norm"] > 1e-3  # the adapters change, so the gap shows whether they were merged
        assert step["logprob_gap_max"] < 1e-4
    assert abs(steps[0]["kl"]) < 1e-6 and all(step["kl"] > 1e-5 for step in steps[1:])
