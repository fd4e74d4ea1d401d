"""Every algorithm that ships with slime trains on the real engines, with the flags of its example."""

from __future__ import annotations

import importlib.util
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.integration.in_house import train_in_house

from slime.engine.server import EngineServer
from slime.registry.plugin_set import survey_plugins

pytestmark = pytest.mark.engine

EXAMPLE = Path(__file__).parents[2] / "examples" / "algorithms" / "compare.py"
#: a random model never gives a correct answer, but it does write letters
REWARD = """
def letters(samples):
    return [sum(c.isalpha() for c in sample.response) / 10 for sample in samples]
"""


def example() -> Any:
    """The example's module."""
    spec = importlib.util.spec_from_file_location("compare", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ALGORITHMS: dict[str, str] = example().ALGORITHMS


def test_the_example_has_every_estimator_that_ships() -> None:
    own = {component.name for component in survey_plugins().components("estimator") if component.found.own}
    assert set(ALGORITHMS) == own


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.row("A1")
def test_algorithms_train_on_the_real_engines(
    name: str, engine: EngineServer, model: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    flags = ["--hf-checkpoint", str(model), "--prompt-data", str(data), "--lr", "1e-3", "--num-rollout", "2"]
    flags += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"]
    flags += ["--num-steps-per-rollout", "2", "--custom-rm-path", f"{tmp_path}/reward.py:letters"]
    flags += ["--advantage-estimator", name, *shlex.split(ALGORITHMS[name])]
    if name == "ppo":
        flags += ["--num-critic-only-steps", "0"]
    filtered = "--sampling-filter" in flags
    if filtered:  # with the default, the gap would include the change of the policy
        flags += ["--no-use-rollout-logprobs"]
    steps = train_in_house(flags, engine, tmp_path)
    assert len(steps) == 2
    for step in steps:
        assert math.isfinite(step["loss"])
        assert step["grad_norm"] > 1e-4
        assert step["advantage_std"] > 0
    # In the first rollout no group waited in the buffer while the policy changed; in the second some may.
    for step in steps[:1] if filtered else steps:
        assert step["logprob_gap_max"] < 1e-4
    # The policy changed, so the second step of a rollout has other ratios than the first.
    assert abs(steps[0]["ratio"] - 1.0) > 1e-6
