"""What `slime train --dry-run` reports about prompts, and what it refuses."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Slime
from tests.support.prompt_files import FORMATS, numbered, write_rows

from slime.cli import output, preflight_data
from slime.cli.preflight_data import PromptSet, look
from slime.kit.readers.opening import open_reader
from slime.kit.readers.prompt_source import parse_source
from slime.kit.readers.rows import Columns

Refused = Callable[..., str]
PROMPTS = PromptSet("training", [], Columns("prompt", "label"))


def data_lines(text: str) -> list[str]:
    """The lines of the plan about the data."""
    _, _, rest = text.partition("\ndata ")
    return [line.strip() for line in re.split(r"\n(?=\S)", rest)[0].splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_counted(dry_run: Slime, kind: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path, kind, numbered(120))
    ended = dry_run("--prompt-data", f"{path}@[5:]")
    assert ended.code == 0, ended.err
    assert data_lines(ended.out) == [f"training: {path}@[5:]: 115 rows, longest prompt 4 of at most 56 tokens"]


def test_a_dry_run_that_takes_long_says_what_it_reads(
    dry_run: Slime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path, "jsonl", numbered(120))
    assert "slime: reading" not in dry_run("--prompt-data", f"{path}").err
    monkeypatch.setattr(output, "_SOON_S", -1.0)
    ended = dry_run("--prompt-data", f"{path}")
    assert f"slime: reading {path.name}: 1 block" in ended.err
    assert re.search(r"slime: reading the weights of --hf-checkpoint \S+: \d+ tensors", ended.err), ended.err


def test_each_file_is_listed_with_its_share(dry_run: Slime, tmp_path: Path) -> None:
    a = write_rows(tmp_path, "jsonl", numbered(3), name="a")
    b = write_rows(tmp_path, "parquet", numbered(9), name="b")
    lines = data_lines(dry_run("--prompt-data", f"{a}=3", f"{b}=1").out)
    assert lines[0].endswith("a.jsonl: 3 rows, longest prompt 2 of at most 56 tokens, 75.0% of the prompts")
    assert lines[1].endswith("b.parquet: 9 rows, longest prompt 2 of at most 56 tokens, 25.0% of the prompts")


def test_files_of_a_run_file(slime: Slime, base_words: list[str], tmp_path: Path) -> None:
    write_rows(tmp_path, "jsonl", numbered(3), name="a")
    write_rows(tmp_path, "jsonl", numbered(4), name="b")
    (tmp_path / "run.toml").write_text('[data]\nprompt_data = ["a.jsonl=1", "b.jsonl@[1:]=1"]\nstreaming_data = true\n')
    at = base_words.index("--prompt-data")
    ended = slime("train", "run.toml", "--dry-run", *base_words[:at], *base_words[at + 2 :])
    assert ended.code == 0, ended.err
    assert "b.jsonl@[1:]: 3 rows" in ended.out


def test_skipped_rows_are_counted(dry_run: Slime, refused: Refused, tmp_path: Path) -> None:
    rows: list[Any] = [*numbered(4), "{", {"prompt": "x" * 70, "label": ""}, {"prompt": "y" * 80, "label": ""}]
    path = str(write_rows(tmp_path, "jsonl", rows))
    tolerant = ("--bad-rows", "skip", "--overlong-prompts", "drop")
    ended = dry_run("--prompt-data", path, *tolerant)
    assert "4 of at most 56 tokens" not in ended.out
    assert data_lines(ended.out) == [
        f"training: {path}: 7 rows, longest prompt 2 of at most 56 tokens, 1 bad rows are left out,"
        " 2 prompts over the limit are left out"
    ]
    assert f"{path}:6: the prompt has 70 tokens, expected at most 56" in refused("--prompt-data", path, *tolerant[:2])
    assert f"{path}:5 is not valid JSON" in refused("--prompt-data", path, *tolerant[2:])
    assert "1 rows cannot be used, and --max-bad-rows is 0" in refused(
        "--prompt-data", path, *tolerant, "--max-bad-rows", "0"
    )


def test_repeated_prompts_are_noted(dry_run: Slime, tmp_path: Path) -> None:
    rows = [
        *numbered(3),
        {"prompt": "q1", "label": "1"},
        {"prompt": "q2", "label": "no"},
        {"prompt": "q2", "label": "2"},
    ]
    [line] = data_lines(dry_run("--prompt-data", str(write_rows(tmp_path, "jsonl", rows))).out)
    assert line.endswith("3 rows repeat the prompt of an earlier one (1 of them with another label)")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("given", "repeated"),
    [
        ([1, 2, 1, 1], 2),
        (["a", "b", "b", "c"], 1),
        ([None, None, None, 7], 0),
        ([{"id": 5}, {"id": 6}, {"id": 5}, {"id": 7}], 1),
        ([1, 2, 3, 4], 0),
    ],
)
def test_rows_with_the_same_id_are_noted(
    dry_run: Slime, tmp_path: Path, kind: str, given: list[Any], repeated: int
) -> None:
    key = "metadata" if isinstance(given[0], dict) else "id"
    rows = [{**row, key: one} for row, one in zip(numbered(4), given, strict=True)]
    [line] = data_lines(dry_run("--prompt-data", str(write_rows(tmp_path, kind, rows))).out)
    assert (f"{repeated} rows have the id of an earlier one" in line) == bool(repeated)
    assert ("the id of an earlier one" in line) == bool(repeated)


def test_messages_lead_to_a_run_of_supervised_training(slime: Slime, base_words: list[str], tmp_path: Path) -> None:
    """What the errors say is done, until the run may start."""
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rows: list[dict[str, Any]] = [{"messages": [dict(message) for message in chat]} for _ in range(3)]
    path = str(write_rows(tmp_path, "jsonl", rows))
    at = base_words.index("--advantage-estimator")
    words = [*base_words[:at], *base_words[at + 4 :], "--loss-type", "sft_loss", "--apply-chat-template"]

    def said(*more: str) -> str:
        ended = slime("train", "--dry-run", *words, "--prompt-data", path, *more)
        return ended.err if ended.code else "runs"

    moved = 'row["label"] = row["messages"].pop()["content"]'
    assert "Did you mean --input-key messages?" in said()
    assert moved in said("--input-key", "messages")
    assert said("--input-key", "messages", "--label-key", "none").count(moved) == 2
    for row in rows:
        exec(moved, {"row": row})
    write_rows(tmp_path, "jsonl", rows)
    assert said("--input-key", "messages") == "runs"


def test_no_row_of_an_evaluation_set_is_skipped(refused: Refused, tmp_path: Path) -> None:
    path = write_rows(tmp_path, "jsonl", [*numbered(4), "{"], name="e")
    words = ("--eval-prompt-data", "held", str(path), "--eval-interval", "1", "--bad-rows", "skip")
    assert f"{path}:5 is not valid JSON" in refused(*words)


def test_data_without_a_usable_row(refused: Refused, tmp_path: Path) -> None:
    path = write_rows(tmp_path, "jsonl", [{"prompt": "x" * 70, "label": ""}] * 3)
    assert "has no rows that can be used: 0 are bad, and 3 over the limit of 56 tokens" in refused(
        "--prompt-data", str(path), "--overlong-prompts", "drop"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a.jsonl=0.5 b.jsonl", "b.jsonl has no weight and a.jsonl has one"),
        ("a.jsonl=0", "got the weight 0, expected a number above 0"),
        ("a.jsonl a.jsonl", "a.jsonl is named twice"),
        ("a.jsonl@[9:3]", "a.jsonl@[9:3] is empty: a.jsonl has 3 rows"),
        ("a.jsonl@[0-3]", "got the slice @[0-3], expected @[START:STOP]"),
        ("c.parquet", "c.parquet has no column 'label' (--label-key). Its columns: 'prompt', 'lable'."),
        ("a.jsonl --tool-key tools", "--tool-key tools has no effect without --apply-chat-template"),
        ("a.jsonl --apply-chat-template --tool-key tolls", "no row has tools under the key 'tolls' (--tool-key)"),
        ("a.jsonl --apply-chat-template --tool-key metadata.tool", "Keys of the rows: 'prompt', 'label', 'metadata'"),
        (
            "a.jsonl --metadata-key metadat",
            "no row has metadata under the key 'metadat' (--metadata-key). Keys of the rows: 'prompt', 'label',"
            " 'metadata', 'metadata.row'. Did you mean metadata?",
        ),
        ("c.parquet --label-key lable --metadata-key more", "(--metadata-key). Keys of the rows: 'prompt', 'lable'."),
        ("d.jsonl --apply-chat-template --tool-key tools", "d.jsonl:1: the row has tools, and the chat template"),
        ('a.jsonl --apply-chat-template-kwargs {"a":1}', "has no effect without --apply-chat-template"),
        (
            'a.jsonl --apply-chat-template --apply-chat-template-kwargs {"tools":1}',
            "'tools' is set by slime",
        ),
        ("a.jsonl --apply-chat-template-kwargs no", "--apply-chat-template-kwargs"),
        ("a.jsonl --bad-rows ignore", "--bad-rows"),
        ("a.jsonl --num-data-workers -1", "--num-data-workers"),
    ],
)
def test_invalid_prompt_data_is_refused(refused: Refused, words: str, message: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_rows(tmp_path, "jsonl", numbered(3), name=name)
    write_rows(tmp_path, "parquet", [{"prompt": "a", "lable": "b"}], name="c")
    write_rows(tmp_path, "jsonl", [{"prompt": "a", "label": "b", "tools": [{"name": "f"}]}], name="d")
    assert message in refused("--prompt-data", *words.split())


# --- large files -----------------------------------------------------------------------------------


def test_only_a_sample_of_a_large_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_data, "WHOLE", 3)
    monkeypatch.setattr(preflight_data, "SAMPLED", 4)
    rows = [{"prompt": "x" * 200, "label": f"{n:06}"} for n in range(5000)]
    path = write_rows(tmp_path, "jsonl", rows)
    facts = look(parse_source(str(path)), PROMPTS)
    assert facts.sampled is not None and facts.sampled < 1200
    assert abs(facts.rows - 5000) < 100
    assert re.search(
        r": about \d+ rows, .* by \d+ rows of a sample; the others are checked when the run begins", str(facts)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_sparse_metadata_of_a_large_file_may_lie_outside_the_sample(
    dry_run: Slime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    rows: list[Any] = [{"prompt": "x", "label": "1", "info": None} for n in range(5000)]
    rows[-1]["info"] = {"k": 1}
    path = write_rows(tmp_path, kind, rows)
    words = ("--prompt-data", str(path), "--metadata-key", "info")
    assert dry_run(*words).code == 0
    monkeypatch.setattr(preflight_data, "WHOLE", 2)
    monkeypatch.setattr(preflight_data, "SAMPLED", 2)
    assert dry_run(*words).code == 0
    assert "no row has metadata under the key 'inf'" in dry_run(*words[:-1], "inf").err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "key", "value", "near", "ascii_alone"),
    [
        ("--metadata-key", "info", {"k": 1}, "inf", True),
        ("--metadata-key", "extra.info", {"k": 1}, "extra.inf", True),
        ("--metadata-key", "größe", {"k": 1}, "größ", True),
        ("--metadata-key", "größe", {"k": 1}, "größ", False),
        ("--tool-key", "tools", [{"type": "function", "function": {"name": "f"}}], "tool", True),
    ],
)
def test_a_key_that_only_rows_outside_the_sample_have(
    dry_run: Slime,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    key: str,
    value: Any,
    near: str,
    ascii_alone: bool,
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "x", "label": "1"} for _ in range(5000)]
    head, _, rest = key.partition(".")
    rows[-1][head] = {rest: value} if rest else value
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=ascii_alone) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setattr(preflight_data, "WHOLE", 2)
    monkeypatch.setattr(preflight_data, "SAMPLED", 2)
    words = ("--prompt-data", str(path), "--apply-chat-template", flag)
    reader = open_reader(parse_source(str(path)), Columns("prompt", "label"))
    assert reader.may_have(key) and not reader.may_have(near)
    [line] = data_lines(dry_run(*words, key).out)
    assert f"none of the sampled rows has {'tools' if 'tool' in flag else 'metadata'} ({flag} {key})" in line
    assert f"under the key {near!r} ({flag})" in dry_run(*words, near).err


def test_only_the_beginning_of_a_large_gzip_file_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_data, "WHOLE", 2)
    text = "".join(json.dumps(row) + "\n" for row in numbered(20_000))
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(text.encode())[:-9])  # the end of the file is never read
    facts = look(parse_source(f"{tmp_path}/p.jsonl.gz"), PROMPTS)
    assert str(facts).startswith(f"{tmp_path}/p.jsonl.gz: more than ")


@pytest.mark.slow
def test_only_a_few_row_groups_of_a_large_parquet_file_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_data, "WHOLE", 3)
    path = write_rows(tmp_path, "parquet", numbered(24_000), group=2_000)
    facts = look(parse_source(str(path)), PROMPTS)
    assert (facts.rows, facts.nearly, facts.sampled) == (24_000, "", 8_000)
