"""Typical wrong data gets a message that shows the right form; odd files get one quickly and in little memory."""

from __future__ import annotations

import gzip
import json
import os
import resource
import time
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime.cli.preflight_data import WHOLE
from slime.errors import DataError
from slime.kit.readers import PromptFile, json_lines
from slime.kit.readers.opening import open_reader
from slime.kit.readers.prompt_source import parse_source, parse_sources
from slime.kit.readers.rows import Columns


def refused(path: Path, **keys: Any) -> str:
    with pytest.raises(DataError) as caught:
        PromptFile(path, **{"input_key": "prompt", "label_key": "label"} | keys)
    return str(caught.value)


def text_file(folder: Path, text: str, name: str = "p.jsonl") -> Path:
    path = folder / name
    path.write_text(text)
    return path


ROWS = [{"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}, {"prompt": "b", "label": "c"}]


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("\n".join(json.dumps(row, indent=2) for row in ROWS), "."),
        ("\ufeff\n" + json.dumps(ROWS[0], indent=4), "."),
        (json.dumps(ROWS, indent=2), ".[]"),
        ("[" + ",\n".join(map(json.dumps, ROWS)) + "]", ".[]"),
    ],
)
def test_json_over_several_lines_gets_the_right_form_and_the_command(tmp_path: Path, text: str, selected: str) -> None:
    path = text_file(tmp_path, text)
    message = refused(path)
    assert "is not valid JSON" in message
    assert (
        'put each object on one line, as in {"prompt": "...", "label": "..."}: '
        f"jq -c '{selected}' {path} > rows.jsonl" in message
    )


def test_a_list_on_one_line_gets_the_command(tmp_path: Path) -> None:
    path = text_file(tmp_path, json.dumps(ROWS))
    assert f"If the whole file is one JSON list: jq -c '.[]' {path} > rows.jsonl" in refused(path)


def test_a_truncated_row_is_not_mistaken_for_json_over_several_lines(tmp_path: Path) -> None:
    path = text_file(tmp_path, json.dumps(ROWS[0]) + '\n{"prompt": "a", "label": tru}\n')
    assert refused(path).endswith('{"prompt": "a", "label": tru}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'prompt': 'a', 'label': 'b'}\n", 'JSON has double quotes: {"prompt": "...", "label": "..."}. Write rows'),
        ("What is 1+1?\n", 'Expected one object per line, such as {"prompt": "...", "label": "..."}'),
        ('{"messages": [], "label": "a"}', "has no key 'prompt' (--input-key). Its keys: 'messages', 'label'. Did you"),
        ('{"messages": [], "label": "a"}', "Did you mean --input-key messages?"),
        ('{"prompt": "a", "answer": "a"}', "Did you mean --label-key answer?"),
        ('{"prompt": "a"}', "If there are no labels: --label-key none"),
        (json.dumps({"prompt": json.dumps(ROWS[0]["prompt"]), "label": "a"}), "is a chat as JSON text, expected the"),
        ('{"prompt": "a", "label": "b", "metadata": ' + "[" * 60 + "]" * 60 + "}", "nested more than 50 levels deep"),
        ('{"prompt": "\\ud800", "label": "b"}', "is not valid JSON: no low surrogate"),
        ('{"prompt": "a", "label": 1e999}', "is not valid JSON: number is infinity"),
        ("[" * 100_000, "is not valid JSON: depth limit exceeded"),
    ],
)
def test_typical_mistakes_get_the_right_form(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(text_file(tmp_path, text))


def test_a_prompt_that_only_looks_like_a_chat_is_text(tmp_path: Path) -> None:
    prompts = ['[{"a": 1}] is a list', '[{"role": "user"}]', "[{x}]"]
    path = text_file(tmp_path, "\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    assert [row.prompt for row in PromptFile(path, input_key="prompt", label_key=None)] == prompts


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ""), ("a.TSV", ", sep='\\t'")])
def test_a_table_as_text_gets_the_command_that_converts_it(tmp_path: Path, name: str, separator: str) -> None:
    path = text_file(tmp_path, "prompt,label\na,b\n", name)
    assert f"pandas.read_csv('{path}'{separator}).to_json('a.jsonl', orient='records', lines=True)" in refused(path)


def test_json_lines_named_csv_are_read(tmp_path: Path) -> None:
    assert len(PromptFile(text_file(tmp_path, '{"prompt": "a"}', "a.csv"), input_key="prompt", label_key=None)) == 1


def test_a_column_of_another_tool_is_suggested(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["a"], "label": ["b"]}), tmp_path / "t.parquet")
    assert "Did you mean --input-key question?" in refused(tmp_path / "t.parquet")


def test_a_damaged_name_of_a_column_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "t.parquet", store_schema=False)
    (tmp_path / "t.parquet").write_bytes((tmp_path / "t.parquet").read_bytes().replace(b"prompt", b"\x97rompt"))
    assert "is not a valid Parquet file" in refused(tmp_path / "t.parquet")


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_a_date_that_python_cannot_hold_is_a_bad_row(kind: str, tmp_path: Path) -> None:
    beyond = pa.array([0, 2**62], pa.timestamp("us"))
    table = pa.table({"prompt": ["a", "b"], "metadata": pa.StructArray.from_arrays([beyond], ["at"])})
    path = tmp_path / ("t.parquet" if kind == "parquet" else "t")
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        import datasets

        datasets.Dataset(table).save_to_disk(path)
    message = refused(path, label_key=None)
    assert "row 1: it has a value that cannot be read" in message


# --- files that are no files, or huge ----------------------------------------------------------------


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "is a pipe, a device or a socket" in refused(tmp_path / "pipe")
    assert "is a pipe, a device or a socket" in refused(Path("/dev/zero"))
    assert "Too many levels of symbolic links" in refused(tmp_path / "loop")
    assert len(parse_sources([str(tmp_path / "loop"), str(tmp_path / "pipe")])) == 2


def test_a_gzip_file_of_a_binary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"\0" * 1000))
    assert "is a binary file" in refused(tmp_path / "a.gz")


def test_a_line_that_does_not_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "LONGEST_LINE", 2**20)
    path = text_file(tmp_path, '{"prompt": "' + "a" * 2**21 + '"}')
    message = refused(path)
    assert message.startswith(f"{path}: the line around byte") and "has more than 1 MiB" in message
    fits = text_file(tmp_path, '{"prompt": "' + "a" * (2**20 - 99) + '"}\n{"prompt": "b"}', "fits.jsonl")
    assert len(PromptFile(fits, input_key="prompt", label_key=None)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("letter", [b"\0", b" ", b"a", b"\n"])
def test_a_gigabyte_in_a_small_gzip_file_is_refused_quickly_and_in_little_memory(tmp_path: Path, letter: bytes) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    packer = zlib.compressobj(1, wbits=31)
    with path.open("wb") as file:
        for _ in range(1024):
            file.write(packer.compress(letter * 2**20))
        file.write(packer.flush())
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(DataError, match=r"binary file|the line around byte|not valid JSON|has no rows"):
        for position, row in _looked_at(path):
            raise DataError(f"{position} {row}")
    assert time.process_time() - began < 90
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024  # KiB


def _looked_at(path: Path) -> Any:
    """The rows that a dry run reads of a file."""
    reader = open_reader(parse_source(str(path)), Columns("prompt", None), by_block=True, most_unpacked=WHOLE * 2**16)
    try:
        yield from reader.scan()
    finally:
        reader.close()
