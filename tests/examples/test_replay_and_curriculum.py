"""The examples curriculum and replay-buffer, shortened: properties of their data, and both runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.python import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"

PREPARE = """
import random, sys
from pathlib import Path
sys.path[:0] = [f"{EXAMPLES}/curriculum", f"{EXAMPLES}/common"]
from make_data import lesson, make_data
for name in ("curriculum", "replay-buffer"):
    print(make_data(Path(f"outputs/{name}/train.jsonl"), copies=4))
"""
TEACH = """
from teach import teach
for name in ("curriculum", "replay-buffer"):
    teach(Path(f"outputs/{name}/model"), lesson, steps=80)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and data at the paths of the run files."""
    folder = tmp_path_factory.mktemp("examples")
    run_python(["-c", (PREPARE + TEACH).replace("{EXAMPLES}", str(EXAMPLES))], folder)
    return folder


def train(root: Path, example: str, *words: str) -> list[dict[str, Any]]:
    short = ["--rollout-batch-size", "4", "--global-batch-size", "32", "--startup-timeout-s", "300"]
    command = ["-m", "slime.cli.main", "train", str(EXAMPLES / example / "grpo.toml"), "--run-name", f"{example}-run"]
    run_python([*command, *short, *words], root)
    lines = (root / "outputs" / f"{example}-run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "ledger/taken" in row]


def test_questions_have_their_difficulty_and_the_lessons_are_often_wrong(tmp_path: Path) -> None:
    run_python(["-c", PREPARE.replace("{EXAMPLES}", str(EXAMPLES))], tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "outputs/curriculum/train.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    for row in rows:
        assert row["prompt"][0]["content"] == f"say {row['metadata']['difficulty']}"
        assert row["label"] == "a" * row["metadata"]["difficulty"]


@pytest.mark.nightly
@pytest.mark.engine
def test_the_curriculum_starts_with_the_easiest_questions_and_moves_up(root: Path) -> None:
    steps = train(
        root, "curriculum", "--num-rollout", "3", "--data-source.window", "32", "--data-source.raise-above", "0"
    )
    assert [step["curriculum/level"] for step in steps] == [2, 3, 4]
    rows = (root / "outputs/curriculum-run/rollouts/000000.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(row)["label"] for row in rows} == {"a"}


@pytest.mark.nightly
@pytest.mark.engine
def test_replay_generates_less_and_limits_reuse(root: Path) -> None:
    steps = train(root, "replay-buffer", "--num-rollout", "4")
    assert sum(step.get("rollout/reused", 0) for step in steps) > 0
    assert sum(step["rollout/groups_generated"] for step in steps) < 16
    uses: dict[int, int] = {}
    for file in sorted((root / "outputs/replay-buffer-run/rollouts").glob("0*.jsonl")):
        groups = {json.loads(row)["group"] for row in file.read_text(encoding="utf-8").splitlines()}
        assert len(groups) == 4
        for group in groups:
            uses[group] = uses.get(group, 0) + 1
    assert max(uses.values()) in (2, 3)
