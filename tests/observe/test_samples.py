"""Files of samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from slime.observe.samples import write_eval, write_rollout
from slime.types import Group, Sample, Status


def test_a_rollout_file_has_one_readable_line_per_sample_in_group_order(tmp_path: Path) -> None:
    groups = [
        Group(
            4,
            [
                Sample(
                    group_index=4,
                    index=40,
                    prompt="1+1=",
                    tokens=[1, 2, 3, 9],
                    response="2",
                    response_length=1,
                    label="2",
                    reward=1.0,
                    status=Status.COMPLETED,
                    finish_reason="stop",
                    weight_versions=["3"],
                )
            ],
        ),
        Group(5, [Sample(group_index=5, index=41, status=Status.FAILED, failure="reward x: ValueError: bad")]),
    ]
    write_rollout(tmp_path, 12, groups)
    path = tmp_path / "rollouts" / "000012.jsonl"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {
        "group": 4,
        "index": 40,
        "prompt": "1+1=",
        "response": "2",
        "label": "2",
        "reward": 1.0,
        "status": "completed",
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "response_tokens": 1,
        "trained_tokens": 1,
        "weight_versions": ["3"],
        "failure": None,
    }
    assert (second["status"], second["failure"]) == ("failed", "reward x: ValueError: bad")
    assert [file.name for file in path.parent.iterdir()] == ["000012.jsonl"]


def test_routed_experts_are_counted_and_not_written(tmp_path: Path) -> None:
    sample = Sample(tokens=[1, 2, 3, 9], response_length=2, rollout_routed_experts=np.zeros((3, 4, 8), np.uint8))
    write_rollout(tmp_path, 0, [Group(0, [sample])])
    row = json.loads((tmp_path / "rollouts" / "000000.jsonl").read_text())
    assert row["routed_tokens"] == 3 and "rollout_routed_experts" not in row


def test_dropped_samples_are_in_a_separate_file_with_the_reason(tmp_path: Path) -> None:
    write_rollout(tmp_path, 3, [], [(Group(7, [Sample(group_index=7), Sample(group_index=7)]), "all rewards equal")])
    rows = map(json.loads, (tmp_path / "rollouts" / "dropped_000003.jsonl").read_text().splitlines())
    assert [(row["group"], row["dropped"]) for row in rows] == [(7, "all rewards equal")] * 2
    write_rollout(tmp_path, 3, [])  # after a restart, when nothing was dropped
    assert [file.name for file in (tmp_path / "rollouts").iterdir()] == ["000003.jsonl"]


def test_invalid_unicode_is_replaced(tmp_path: Path) -> None:
    sample = Sample(prompt=[{"role": "user", "content": "hi"}], response="broken \ud83d end", reward=0.5)
    path = write_eval(tmp_path, 3, "held", [(sample, {"passed": True})])
    assert path.name == "eval_held_000003.jsonl"
    row = json.loads(path.read_text())
    assert (row["response"], row["reward"], row["passed"]) == ("broken ? end", 0.5, True)
    assert "hi" in str(row["prompt"])


def test_an_integer_of_more_than_64_bits_is_written_as_text(tmp_path: Path) -> None:
    sample = Sample(prompt="hi", response="yo", reward=0.5)
    row = json.loads(
        write_eval(tmp_path, 3, "held", [(sample, {"big": 2**70, "small": -5, "in": {"n": [2**64, 1]}})]).read_text()
    )
    assert (row["big"], row["small"], row["reward"]) == (str(2**70), -5, 0.5)
    assert row["in"] == {"n": [str(2**64), 1]}


def test_a_line_has_the_conversation_and_the_metrics_of_the_generator(tmp_path: Path) -> None:
    sample = Sample(
        tokens=[1, 2, 3, 4],
        response_length=3,
        loss_mask=[1, 0, 1],
        metadata={"messages": [{"role": "assistant", "content": "look"}], "other": 1},
        metrics={"tools/search/calls": 1.0},
    )
    write_rollout(tmp_path, 0, [Group(0, [sample])])
    [row] = map(json.loads, (tmp_path / "rollouts" / "000000.jsonl").read_text().splitlines())
    assert (row["trained_tokens"], row["metrics"]) == (2, {"tools/search/calls": 1.0})
    assert row["messages"] == [{"role": "assistant", "content": "look"}]
    assert "other" not in row


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "rollouts").touch()
    with pytest.raises(FileExistsError, match=f"'{tmp_path}/rollouts'$"):
        write_eval(tmp_path, 3, "aime", [])
