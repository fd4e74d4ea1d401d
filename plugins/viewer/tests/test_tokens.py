"""Numbers of one value a token: read from files as slime writes them, joined with samples, and damaged ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from plugins.viewer.tests.making import NAN, TOKEN_ROWS, make_run, make_run_with_tokens, sample_of, write_tokens

from slime.errors import DataError
from slime.observe.samples import write_rollout
from slime.types import Group
from slime_viewer import answers
from slime_viewer.filters import read_filter
from slime_viewer.index import RunIndex
from slime_viewer.queries import count
from slime_viewer.run_files import RunFolder
from slime_viewer.tokens import logged_tokens, read_extremes, summaries, tokens_path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run_with_tokens(tmp_path / "run")


def indexed(run: Path) -> RunIndex:
    index = RunIndex(RunFolder(run), None)
    index.refresh()
    return index


def test_a_sample_has_its_columns_in_the_order_of_the_file_and_no_value_is_null(run: Path) -> None:
    told = answers.tokens_answer(indexed(run), "000001:5")["tokens"]
    assert told["pieces"] == ["<tool>", "\u202e<b>", "\n"] and told["ids"] == [0, 1, 2]
    assert list(told["values"])[:3] == ["source", "gap", "credit"] and told["own"] == ["credit"]
    assert told["values"]["credit"] == [None, -3.0, 0.5]
    assert told["flag"] == "sampled"
    missing = answers.tokens_answer(indexed(run), "000001:1")["tokens"]
    assert "credit" not in missing["values"] and missing["own"] == []


@pytest.mark.parametrize("key", ["000001:2", "000000:0", "eval_held_out_000002:0"])
def test_a_sample_without_tokens_has_none(run: Path, key: str) -> None:
    assert answers.tokens_answer(indexed(run), key) == {"tokens": None}


def test_the_most_extreme_tokens_of_a_run_lead_to_their_samples(run: Path) -> None:
    index = indexed(run)
    told = answers.extremes_answer(index, "", "", "size")
    assert told["columns"] == ["advantage", "clipped", "credit", "gap"] and told["column"] == "gap"
    first = [(row["key"], row["at"], round(row["value"], 3)) for row in told["rows"][:2]]
    assert first == [("000001:1", 1, -0.75), ("000001:0", 1, 0.5)]
    assert told["rows"][0]["piece"] == "\u202e<b>"
    highest = answers.extremes_answer(index, "", "credit", "high")["rows"]
    assert [row["value"] for row in highest] == [2.0, 1.0, 0.5, -3.0]
    lowest = answers.extremes_answer(index, "group=8", "credit", "low")["rows"]
    assert [(row["key"], row["value"]) for row in lowest] == [("000001:5", -3.0), ("000001:5", 0.5)]
    with pytest.raises(DataError, match="tokens cannot be ordered by 'best'; expected high, low, size"):
        answers.extremes_answer(index, "", "gap", "best")


def test_samples_are_found_by_their_gap_and_by_why_they_were_logged(run: Path) -> None:
    index = indexed(run)
    assert count(index, read_filter("gap>0.4")) == 2
    assert count(index, read_filter("flag:sampled")) == 1
    assert count(index, read_filter("gap:none")) == 2 * 12 + 3 - 12 + 8 - 3


def test_a_group_tells_what_training_made_of_its_answers(run: Path) -> None:
    told = answers.group_answer(indexed(run), "000001/7")["tokens"]
    assert sorted(told) == ["000001:0", "000001:1"]
    one = told["000001:0"]
    assert (one["advantage"], one["clipped"], one["gap"]) == (0.5, 0.5, 0.5)
    assert (one["by_tool"], one["by_template"], one["flag"]) == (1, 0, "gap")


def test_tokens_that_are_written_later_or_anew_are_taken_over(run: Path) -> None:
    path = run / "rollouts" / "000001.tokens.parquet"
    kept = path.read_bytes()
    path.unlink()
    index = indexed(run)
    assert answers.extremes_answer(index, "", "", "size") == {"columns": [], "column": "", "rows": []}
    path.write_bytes(kept)
    index.refresh()
    assert count(index, read_filter("gap>0.4")) == 2
    write_tokens(path, {2: {"gap": [NAN, 0.1, 9.0], "credit": None, "flag": "gap"}})
    index.refresh()
    [first, *_] = answers.extremes_answer(index, "", "", "size")["rows"]
    assert (first["key"], first["value"]) == ("000001:2", 9.0)


def test_tokens_of_other_samples_are_refused(run: Path) -> None:
    write_tokens(run / "rollouts" / "000001.tokens.parquet", {0: {**TOKEN_ROWS[0], "credit": [NAN, 1.0]}}, tokens=2)
    with pytest.raises(DataError, match="is of other samples: 2 tokens where the answer has 3"):
        answers.tokens_answer(indexed(run), "000001:0")


def test_no_thread_of_pyarrow_holds_an_object_of_python(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that freed a page while the interpreter ended took a whole run with it, by SIGABRT."""
    sources: list[Any] = []
    parquet_file = pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda source: sources.append(source) or parquet_file(source))
    path = tokens_path(next((run / "rollouts").glob("000001.*")))
    read_extremes(path), logged_tokens(path, {5: None}), summaries(path, {1, 5})
    assert [type(source) for source in sources] == [pa.OSFile] * 3


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def _noise(path: Path) -> None:
    path.write_bytes(b"PAR1" + bytes(range(256)) * 20 + b"PAR1")


def _later(path: Path) -> None:
    write_tokens(path, TOKEN_ROWS, about={"format": 99})


def _foreign(path: Path) -> None:
    pq.write_table(
        pa.table({"line": ["a", "b"], "gap": [1, 2]}).replace_schema_metadata({"slime": '{"format":1}'}), path
    )


@pytest.mark.parametrize("damage", [_cut, _noise, _later, _foreign])
def test_a_damaged_file_is_told_and_costs_nothing_else(run: Path, damage: Any) -> None:
    damage(run / "rollouts" / "000001.tokens.parquet")
    index = indexed(run)
    assert any("000001.tokens.parquet" in problem for problem in index.state().problems)
    assert len(answers.group_answer(index, "000001/7")["samples"]) == 4
    with pytest.raises(DataError, match=r"000001\.tokens\.parquet"):
        answers.tokens_answer(index, "000001:0")


def test_of_many_tokens_the_ends_are_kept(tmp_path: Path) -> None:
    values = [float(n) for n in range(100)]
    columns = {
        "line": pa.array([0], pa.int32()),
        "flag": ["sampled"],
        "pieces": pa.array([["x"] * 100]),
        "gap": pa.array([values], pa.list_(pa.float32())),
    }
    path = tmp_path / "000000.tokens.parquet"
    pq.write_table(pa.table(columns).replace_schema_metadata({"slime": '{"format": 1}'}), path)
    found, _ = read_extremes(path)
    assert sorted(one.value for one in found) == values[:10] + values[-10:]
    assert all(one.position == one.value for one in found)


def test_the_file_lies_beside_its_samples(tmp_path: Path) -> None:
    assert tokens_path(tmp_path / "000012.jsonl").name == "000012.tokens.parquet"
    assert logged_tokens(tmp_path / "000012.tokens.parquet", {0: None}) == {}


def test_a_group_that_is_trained_on_again_is_known(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "again", 2)
    group = Group(0, [sample_of(0, 0, n, 1.0) for n in range(4)])
    write_rollout(folder, 5, [group])
    index = indexed(folder)
    assert count(index, read_filter("reused>=1")) == 4
    assert count(index, read_filter("reused>=1 step=5")) == 4
    # The same numbers in an evaluation are other samples.
    assert count(index, read_filter("reused>=1 kind:eval")) == 0


def test_an_answer_with_its_label_is_known(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "labels", 1)
    answers_and_labels = [("it is 42.", "42"), ("142", "42"), ("", "42"), ("42", 42), ("a", None), ("4 42", " 42 ")]
    group = [sample_of(3, 0, n, 0.0, response=text, label=label) for n, (text, label) in enumerate(answers_and_labels)]
    write_rollout(folder, 3, [Group(0, group)])
    found = indexed(folder).query("SELECT labelled FROM samples WHERE step = 3 ORDER BY line")
    assert [one for (one,) in found] == [1, 0, 0, 1, None, 1]
