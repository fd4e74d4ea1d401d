"""The multi-agent example: two branches of one rollout, scored by role, and a step of its run with real engines."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.python import run_python

from slime.plugin import Sample, SamplingParams
from slime.registry.contracts import Snapshot, check_generated, check_tokens_generated
from slime.testing import Say, ScriptedPolicy, make_sample, make_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "multi-agent"


@pytest.fixture(scope="module")
def team() -> Any:
    spec = importlib.util.spec_from_file_location("team", EXAMPLE / "team.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def play(team: Any, *says: str) -> tuple[list[Sample], list[float]]:
    """Samples and rewards of a question whose answer is 4; samples are checked as the kernel checks them."""
    policy = ScriptedPolicy([Say.text(text) for text in says])
    sample = make_sample("2+2=", None, label="4", index=7, group_index=3)
    asked = Snapshot.of(sample)
    sampling = SamplingParams(max_new_tokens=32)
    produced = asyncio.run(team.custom_generate(None, sample, sampling, policy, make_tokenizer()))
    check_generated(produced, asked)
    check_tokens_generated(produced, policy.answers)
    return produced, [asyncio.run(team.reward_func(None, one)) for one in produced]


def test_solver_and_reviewer_are_rewarded_for_an_accepted_correct_answer(team: Any) -> None:
    (solver, reviewer), rewards = play(team, "4", "yes")
    assert rewards == [1.0, 1.0]
    assert solver.rollout_id == reviewer.rollout_id == 7
    assert solver.loss_mask == [1]
    # the answer is trained on in the solver's branch
    assert reviewer.loss_mask is not None and reviewer.loss_mask[0] == 0
    assert reviewer.loss_mask[-3:] == [1, 1, 1]


@pytest.mark.parametrize(
    ("says", "rewards"),
    [
        (("5", "no", "4"), [1.0, 1.0]),
        (("5", "no", "6"), [0.0, 1.0]),
        (("5", "yes"), [0.0, 0.0]),
        (("4", "no", "4"), [1.0, 0.0]),
        (("4", "hm", "5"), [0.0, 0.0]),
    ],
)
def test_the_solver_is_asked_again_if_the_reviewer_disagrees(
    team: Any, says: tuple[str, ...], rewards: list[float]
) -> None:
    (solver, reviewer), got = play(team, *says)
    assert got == rewards
    assert solver.response == (says[2] if len(says) > 2 else says[0])
    assert reviewer.response == says[1]
    assert solver.metrics["team/asked_again"] == float(len(says) > 2)


@pytest.mark.nightly
@pytest.mark.engine
def test_a_rollout_of_two_samples_counts_once_in_a_batch(tmp_path: Path) -> None:
    run_python([str(EXAMPLE / "make_data.py"), "outputs/multi-agent/data"], tmp_path)
    run_python([str(EXAMPLE.parent / "quickstart/make_model.py"), "outputs/multi-agent/warm_start"], tmp_path)
    team = str(EXAMPLE / "team.py")
    flags = ["--num-rollout", "1", "--rollout-batch-size", "4", "--global-batch-size", "32", "--eval-interval", "1"]
    flags += ["--skip-eval-before-train", "--custom-generate-function-path", team, "--custom-rm-path", team]
    slime = ["-m", "slime.cli.main", "train", str(EXAMPLE / "grpo.toml")]
    run_python([*slime, *flags, "--run-name", "grpo"], tmp_path)
    text = (tmp_path / "outputs/grpo/metrics.jsonl").read_text(encoding="utf-8")
    [step] = [row for row in map(json.loads, text.splitlines()) if "time/step" in row]
    assert step["rollout/samples"] == 2 * 4 * 8
    assert step["rollout/failed"] == 0
    assert step["train/logprob_gap_max"] < 1e-4
    assert 0 <= step["rollout/team/first_right"] <= 1
