"""Runs of many steps: what is done every second must not ask, read or compute anew for each of ten thousand files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from plugins.viewer.tests.making import make_run, make_run_with_tokens

from slime_viewer import queries, server
from slime_viewer.index import RunIndex, open_index
from slime_viewer.run_files import RunFolder, SampleFile
from slime_viewer.server import WatchedRun


def statements(index: RunIndex, action: Any) -> list[str]:
    """What an action asks the index."""
    asked: list[str] = []
    index._db.set_trace_callback(asked.append)
    action()
    index._db.set_trace_callback(None)
    return asked


def test_looking_at_files_without_news_asks_the_index_as_often_for_many_as_for_few(tmp_path: Path) -> None:
    asked = []
    for steps in (2, 30):
        index = open_index(RunFolder(make_run(tmp_path / f"run-{steps}", steps=steps)))
        index.refresh()
        asked.append(len(statements(index, index.refresh)))
        index.close()
    assert asked[0] == asked[1]


def test_a_name_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(make_run(tmp_path / "run", steps=3))
    before = list(folder.sample_files())
    read: list[Path] = []
    of = SampleFile.of
    monkeypatch.setattr(SampleFile, "of", lambda path: read.append(path) or of(path))
    assert list(folder.sample_files()) == before and read == []
    shutil.copy(before[0].path, folder.path / "rollouts" / "000003.jsonl")
    before[1].path.unlink()
    assert [file.path.name for file in folder.sample_files() if file.kind == "train"] == [
        "000000.jsonl",
        "000002.jsonl",
        "000003.jsonl",
    ]
    assert [path.name for path in read] == ["000003.jsonl"]


def test_tokens_that_come_after_their_samples_are_taken_over(tmp_path: Path) -> None:
    folder = make_run_with_tokens(tmp_path / "run")
    tokens, away = folder / "rollouts" / "000001.tokens.parquet", tmp_path / "away"
    tokens.rename(away)
    index = open_index(RunFolder(folder))
    index.refresh()
    assert queries.token_columns(index) == []
    away.rename(tokens)
    index.refresh()
    assert "gap" in queries.token_columns(index)
    assert not [one for one in statements(index, index.refresh) if "extremes" in one]


def test_counting_reads_indexes_and_no_rows(tmp_path: Path) -> None:
    """SQLite would choose another index and read the rows of all samples: minutes, with ten million."""
    index = open_index(RunFolder(make_run(tmp_path / "run", steps=2)))
    index.refresh()
    asked = [one for one in statements(index, lambda: queries.counts(index)) if one.startswith("SELECT")]
    assert len(asked) == 3
    for statement in asked:
        [(*_, plan)] = index.query(f"EXPLAIN QUERY PLAN {statement}")
        assert "COVERING INDEX" in plan
    assert queries.counts(index).labelled > 0


def test_what_is_worth_a_look_is_found_once_for_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", steps=12, metrics=lambda _: {"rollout/truncated_ratio": 0.5})
    run = WatchedRun(folder)
    computed: list[object] = []
    find = server.alerts
    monkeypatch.setattr(server, "alerts", lambda *about: computed.append(about) or find(*about))
    run._look()
    first = run.answer()
    assert run.answer()["verdict"] == first["verdict"] and len(computed) == 1
    assert any("were cut off" in alert["text"] for alert in first["verdict"]["alerts"])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "rollout/truncated_ratio": 0.0, "rollout/failed": 3}\n')
    assert run._look(), "metrics are news, too"
    assert any("samples failed" in alert["text"] for alert in run.answer()["verdict"]["alerts"]) and len(computed) == 2
    run.interrupt()
    run.end()


def test_a_long_look_without_news_is_followed_by_a_longer_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = WatchedRun(make_run(tmp_path / "run", steps=1))
    now, rests = [0.0], []
    looks = iter([(0.01, False), (1.0, False), (100.0, False), (100.0, True)])

    def look() -> bool:
        takes, news = next(looks)
        now[0] += takes
        return news

    def rest(seconds: float) -> bool:
        rests.append(seconds)
        if len(rests) == 4:
            run._ended.set()
        return True

    monkeypatch.setattr(server.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(run, "_look", look)
    monkeypatch.setattr(run._ended, "wait", rest)
    run._watch()
    assert rests == [1.0, 4.0, 10.0, 1.0]
    run.interrupt()
    run.end()
