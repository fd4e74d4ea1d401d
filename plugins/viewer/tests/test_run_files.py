"""Run folders that are missing, damaged, hostile or being written: what is read of them, and what is said."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from plugins.viewer.tests.making import make_run

from slime.errors import DataError
from slime_viewer.answers import run_answer
from slime_viewer.index import RunIndex
from slime_viewer.lines import MAX_LINE, complete_lines, dumped
from slime_viewer.progress import progress
from slime_viewer.run_files import Metrics, RunFolder, SampleFile


def test_a_folder_that_is_no_run_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing' does not exist; expected a run folder"):
        RunFolder(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file' is not a folder"):
        RunFolder(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no run folder: it has no config.toml, metrics.jsonl or rollouts/"):
        RunFolder(tmp_path / "empty")
    make_run(tmp_path / "outputs" / "mine", steps=1)
    with pytest.raises(DataError, match=r"Its folder mine is a run: .*outputs/mine"):
        RunFolder(tmp_path / "outputs")


def test_lines_are_read_as_they_are_completed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n\n[2]\nno json\n{"b": "\xff"}\n{"c": 3')
    with path.open("rb") as file:
        lines = list(complete_lines(file))
    assert [(line.offset, line.row) for line in lines] == [(0, {"a": 1}), (10, None), (14, None), (22, None)]
    with path.open("ab") as file:
        file.write(b"}\n")
    with path.open("rb") as file:
        [last] = complete_lines(file, lines[-1].offset + lines[-1].length)
    assert last.row == {"c": 3}


def test_a_line_that_is_too_long_is_one_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": "' + b"x" * 100 + b'"}\n{"b": 2}\n' + b"y" * 100)
    with path.open("rb") as file:
        lines = list(complete_lines(file, max_line=32))
    assert [(line.offset, line.length, line.row) for line in lines] == [(0, 110, None), (110, 9, {"b": 2})]
    assert MAX_LINE > 2**20


def test_metrics_are_merged_by_step_and_read_on(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    assert not metrics.refresh()
    rows = [{"step": 0, "unix_time": 1.5, "a": 1}, {"step": 1, "a": 2, "text": "x"}, {"step": 0, "b": None}]
    metrics.path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1, "a"')
    assert metrics.refresh() and not metrics.refresh()
    assert metrics.rows == {0: {"a": 1.0, "b": None}, 1: {"a": 2.0}}
    assert (metrics.names, metrics.unfinished, metrics.broken) == (["a", "b"], 15, 0)
    with metrics.path.open("a") as file:
        file.write(': 3}\n"a string"\n{"a": 4}\n')
    assert metrics.refresh()
    assert metrics.series("a") == ([0, 1], [1.0, 3.0])
    assert (metrics.unfinished, metrics.broken) == (0, 2)
    metrics.path.write_text('{"step": 7, "a": 1}\n')  # replaced by a shorter one
    assert metrics.refresh()
    assert metrics.steps == [7]


def test_damaged_files_are_told_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "config.toml").write_text("[run\n")
    (folder / "plugins.json").write_text("{")
    (folder / "logs" / "driver.log").write_bytes(b"\x00\xff\x1b[31m WARNING\n")
    run = RunFolder(folder)
    run.metrics.refresh()
    told = "; ".join(run.problems())
    assert "config.toml is not TOML" in told and "plugins.json is not JSON" in told
    assert (run.config(), run.plugins(), run.events()) == ({}, {}, [])
    assert run.metrics.steps == list(range(6))
    (folder / "plugins.json").write_text('{"format": 99, "used": {}}')
    assert any("has format 99, and this slime knows 2: a newer slime wrote" in told for told in run.problems())
    (folder / "metrics.jsonl").unlink()
    assert any("metrics.jsonl is missing" in told for told in run.problems())


def test_a_run_has_the_warnings_of_its_log(tmp_path: Path) -> None:
    run = RunFolder(make_run(tmp_path / "run"))
    assert [(event.level, event.text) for event in run.events()] == [("warning", "the reward is slow")]


def test_files_that_are_something_else_are_told_and_not_waited_for(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    names = ("config.toml", "plugins.json", "metrics.jsonl", "run.lock", "logs/driver.log")
    for name in names:
        (folder / name).unlink()
        os.mkfifo(folder / name)
    run = RunFolder(folder)
    assert run.metrics.refresh() and not run.metrics.refresh()
    told = "cannot be read: it is not a regular file"
    assert run.problems() == [f"{name} {told}" for name in names[:3]]
    assert (progress(run).state, run.events()) == ("unknown", [])


def test_what_json_cannot_hold_is_replaced(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", config=f"[run]\nseed = {2**70}\n")
    nested = "[" * 400 + "]" * 400
    options = f'{{"text": "\\ud800", "big": {2**70}, "deep": {nested}}}'
    (folder / "plugins.json").write_text(f'{{"format": 2, "used": {{"reward": {{"options": {options}}}}}}}')
    run = RunFolder(folder)
    shown = run.plugins()["used"]["reward"]["options"]
    assert (shown["text"], shown["big"]) == ("?", hex(2**70)) and "…" in str(shown["deep"])
    assert run.config() == {"run": {"seed": hex(2**70)}}
    index = RunIndex(run, None)
    assert b"\\ud800" not in dumped(run_answer(run, index.state(), ""))
    assert dumped({"\udcff": ["\udcff", 2**70, float("nan")]}) == b'{"?":["?","0x400000000000000000",null]}'


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("000012.jsonl", ("train", 12, "")),
        ("dropped_000003.jsonl", ("dropped", 3, "")),
        ("eval_held_out_000040.jsonl", ("eval", 40, "held_out")),
        ("eval_2_1_000040.jsonl", ("eval", 40, "2_1")),
        ("failed_reward_rewards_mine.jsonl", ("failed", None, "reward_rewards_mine")),
        ("000012.partial", None),
        ("notes.jsonl", None),
        ("mine_000012.jsonl", None),
    ],
)
def test_sample_files_are_known_by_their_names(name: str, found: tuple[str, int | None, str] | None) -> None:
    file = SampleFile.of(Path(name))
    assert (None if file is None else (file.kind, file.step, file.name)) == found
