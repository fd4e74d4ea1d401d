"""The engines' choice of experts, replayed in training, end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.in_house import train_in_house
from tests.support.engines import cpu_engine, running
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

REWARD = """
def letters(samples):
    return [sum(c.isalpha() for c in sample.response) / 10 for sample in samples]
"""


@pytest.mark.row("N6")
def test_replay_closes_the_gap_that_other_experts_make(data: Path, fork_server: Path, tmp_path: Path) -> None:
    """The engine computes in bfloat16, so its routers often choose otherwise than the trainer's in float32."""
    model = make_tiny_model(tmp_path / "model", "qwen3_moe", seed=0)
    (tmp_path / "reward.py").write_text(REWARD)
    flags = ["--hf-checkpoint", str(model), "--prompt-data", str(data), "--lr", "1e-3", "--num-rollout", "2"]
    flags += ["--rollout-batch-size", "8", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "32"]
    flags += ["--custom-rm-path", f"{tmp_path}/reward.py:letters", "--advantage-estimator", "grpo"]
    flags += ["--check-weight-update-equal"]
    bfloat16 = ("--dtype", "bfloat16")
    engine = cpu_engine(model, tmp_path, extra_args=bfloat16, fork_server=fork_server, routed_experts=True)
    with running(engine):
        gaps = [
            [step["logprob_gap_max"] for step in train_in_house([*flags, *more], engine, tmp_path)]
            for more in ([], ["--use-rollout-routing-replay"])
        ]
    without, replayed = map(min, gaps)
    assert max(gaps[1]) < without / 3, gaps
    assert replayed > 0
