"""The runs of docs/reading-a-run.md: what is wrong with their rewards, and that each alert's filter finds it."""

from __future__ import annotations

import asyncio
import json
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from plugins.viewer.tests.making import make_run, sample_of

from slime.config.assemble import load_config
from slime.observe.samples import write_rollout
from slime.types import Group
from slime_viewer.alerts import alerts
from slime_viewer.filters import read_filter
from slime_viewer.index import RunIndex
from slime_viewer.queries import count, counts, find
from slime_viewer.run_files import RunFolder

EXAMPLE = Path(__file__).parents[2] / "examples" / "stalled-runs"


def scored(answer: str, label: str) -> float:
    reward: Any = runpy.run_path(str(EXAMPLE / "sum_reward.py"))["reward_func"]
    return float(asyncio.run(reward(sample=sample_of(0, 0, 0, 0.0, response=answer, label=label))))


@pytest.mark.parametrize(("answer", "label", "reward"), [("85", "85", 1.0), ("75", "85", 0.0), ("151", "151", 0.0)])
def test_the_reward_fails_for_three_digits_only(answer: str, label: str, reward: float) -> None:
    assert scored(answer, label) == reward


def test_the_alert_of_the_reward_bug_leads_to_right_answers_without_reward(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 0)
    texts = [("85", "85"), ("75", "85"), ("151", "151"), ("141", "151")]
    samples = [
        sample_of(0, 0, n, scored(*text), response=text[0], label=text[1])
        for n, text in ((n, texts[n % 4]) for n in range(100))
    ]
    write_rollout(folder, 0, [Group(0, samples)])
    run = RunFolder(folder)
    index = RunIndex(run, None)
    index.refresh()
    [alert] = alerts(run.metrics, counts(index))
    assert (
        alert.text
        == "25 answers contain their label and got less than the best reward, 1 (33% of the answers that did)"
    )
    condition = read_filter(alert.filter)
    assert count(index, condition) == 25
    assert {one.brief()["answer"] for one in find(index, condition)} == {"151"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What run.py defines."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    return runpy.run_path(str(EXAMPLE / "run.py"))


def test_the_flags_of_every_run_are_accepted(script: dict[str, Any]) -> None:
    for flags in script["RUNS"].values():
        load_config([str(EXAMPLE / "base.toml"), *flags])
    collapse = load_config([str(EXAMPLE / "base.toml"), *script["RUNS"]["entropy-collapse"]])
    assert collapse.data.prompt_data == ["outputs/stalled-runs/yes-no/train.jsonl"]
    assert collapse.rollout.rollout_temperature == 0.3


def test_most_questions_are_answered_with_yes_and_all_labels_are_right(tmp_path: Path, script: dict[str, Any]) -> None:
    script["make_yes_no"](tmp_path)
    for name, rows, yes in (("train", 1800, 1200), ("held_out", 256, 128)):
        found = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        words = [(row["prompt"][0]["content"].removesuffix("?").split(" more than "), row["label"]) for row in found]
        assert len(words) == rows
        assert sum(label == "y" for _, label in words) == yes
        assert all((int(one) > int(other)) == (label == "y") for (one, other), label in words)


def test_the_teacher_is_right_three_times_in_five_and_prefers_no_answer(script: dict[str, Any]) -> None:
    rng = random.Random(0)
    lessons = [script["lesson"](rng) for _ in range(4000)]
    right = 0
    for question, answer in lessons:
        one, other = map(int, question.removesuffix("?").split(" more than "))
        right += (one > other) == (answer == "y")
    assert right / 4000 == pytest.approx(0.6, abs=0.03)
    assert sum(answer == "y" for _, answer in lessons) / 4000 == pytest.approx(0.5, abs=0.03)
