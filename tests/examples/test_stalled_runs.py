"""The runs of docs/reading-a-run.md: what is wrong with their rewards, and that each alert's filter finds it."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.view.making import make_run, sample_of

from slime.observe.samples import write_rollout
from slime.types import Group
from slime.view.alerts import alerts
from slime.view.filters import read_filter
from slime.view.index import RunIndex
from slime.view.queries import count, counts, find
from slime.view.run_files import RunFolder

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
