"""The calculator example, shortened: properties of its data, and both of its runs with real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.python import run_python

from slime_generators.tools.calculator import calculate

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool-calculator"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example's data at the path of its run files."""
    folder = tmp_path_factory.mktemp("tool-calculator")
    run_python([str(EXAMPLE / "make_data.py"), "outputs/tool-calculator/data"], folder)
    return folder


@pytest.mark.slow
def test_labels_match_the_calculator_and_questions_are_unique(root: Path) -> None:
    data = {
        name: rows(root / f"outputs/tool-calculator/data/{name}.jsonl") for name in ("train", "held_out", "teacher")
    }
    for row in data["train"] + data["held_out"]:
        assert row["label"] == calculate(row["prompt"][0]["content"].rstrip("="))
    questions = {name: {row["prompt"][0]["content"] for row in part} for name, part in data.items()}
    assert len(questions["train"]) + len(questions["held_out"]) == len(data["train"]) + len(data["held_out"])
    assert not questions["train"] & questions["held_out"]
    assert not questions["teacher"] & (questions["train"] | questions["held_out"])


def test_the_teacher_is_right_a_third_of_the_time(root: Path) -> None:
    answers = [row for row in rows(root / "outputs/tool-calculator/data/teacher.jsonl") if row["label"].isdecimal()]
    right = sum(row["label"] == calculate(row["prompt"][0]["content"].rstrip("=")) for row in answers)
    assert 0.3 < right / len(answers) < 0.4


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_both_runs_work_and_the_calculator_is_called(root: Path) -> None:
    run_python([str(EXAMPLE / "make_model.py"), "outputs/tool-calculator/model"], root)
    slime = ["-m", "slime.cli.main", "train"]
    # Long enough to learn to start calls, not correct ones; the whole example shows that the reward rises.
    run_python([*slime, str(EXAMPLE / "warm_start.toml"), "--num-rollout", "6", "--run-name", "warm"], root)
    flags = ["--num-rollout", "1", "--rollout-batch-size", "8", "--global-batch-size", "64", "--eval-interval", "1"]
    run_python([*slime, str(EXAMPLE / "grpo.toml"), *flags, "--skip-eval-before-train", "--run-name", "grpo"], root)
    found = rows(root / "outputs/grpo/metrics.jsonl")
    [step] = [row for row in found if "time/step" in row]
    assert step["rollout/tools/calculator/calls"] > 0.1
    assert step["rollout/failed"] == 0
    assert 1.1 < step["rollout/turns"] <= 3
    assert step["train/logprob_gap_max"] < 1e-4
    assert next(row for row in found if "eval/held_out" in row)["eval/held_out/turns"] > 1.1
