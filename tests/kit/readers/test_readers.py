"""Files of every format give the same rows in every mode."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.prompt_files import COLUMNS, FORMATS, numbered, write_rows

from slime.errors import DataError
from slime.kit.readers import PromptFile, json_lines
from slime.kit.readers.opening import open_reader
from slime.kit.readers.prompt_source import parse_source
from slime.kit.readers.reader import BadRow, Reader
from slime.kit.readers.rows import Columns


def opened(path: Path | str, *, by_block: bool = True, columns: Columns = COLUMNS) -> Reader:
    return open_reader(parse_source(str(path)), columns, by_block=by_block)


def in_blocks(reader: Reader) -> list[Any]:
    return [row.prompt for block in range(reader.blocks) for _, row in reader.block(block)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("part", ["", "@[3:8]", "@[-4:]", "@[:-7]", "@[90:150]"])
@pytest.mark.row("D1")
def test_rows_and_slices_are_the_same_in_every_format_and_mode(kind: str, part: str, tmp_path: Path) -> None:
    rows = numbered(250)
    path = f"{write_rows(tmp_path, kind, rows)}{part}"
    bounds = parse_source(path).bounds(250)
    expected = [f"q{n}" for n in range(*bounds)]
    whole = PromptFile(path, input_key="prompt", label_key="label")
    assert [row.prompt for row in whole] == expected
    assert (whole[2].label, whole[2].metadata) == (str(bounds[0] + 2), {"row": bounds[0] + 2})
    assert in_blocks(opened(path)) == expected
    assert in_blocks(pickle.loads(pickle.dumps(opened(path)))) == expected or kind == "gz"


@pytest.mark.parametrize("kind", FORMATS)
def test_chats_tools_and_metadata_are_the_same_in_every_format(kind: str, tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes", "name": "x"},
        {"role": "user", "content": "go on"},
    ]
    tools = [{"name": "f", "parameters": {"type": "object"}}]
    rows = [{"prompt": chat, "label": 2.5, "tools": tools, "metadata": {"k": [1, 2], "o": {"a": "b"}}}]
    columns = {"input_key": "prompt", "label_key": "label", "tool_key": "tools"}
    [row] = PromptFile(write_rows(tmp_path, kind, rows), **columns)
    assert (row.prompt, row.label, row.tools) == (chat, "2.5", tools)
    assert row.metadata == {"k": [1, 2], "o": {"a": "b"}, "tools": tools}


def test_tools_may_be_json_text(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "tools": '[{"name": "f", "max": 18446744073709551616}]'},
        {"prompt": "b", "tools": ""},
        {"prompt": "c"},
    ]
    path = write_rows(tmp_path, "jsonl", rows)
    file = PromptFile(path, input_key="prompt", label_key=None, tool_key="tools")
    assert [row.tools for row in file] == [[{"name": "f", "max": 2**64}], None, None]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "'tools' is a string, but not valid JSON"),
        ({"name": "f"}, "'tools' is an object, expected a list"),
        ([3], r"'tools'\[0\] is a number, expected the schema of a tool"),
    ],
)
def test_tools_of_the_wrong_type_are_named(value: Any, message: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path, "jsonl", [{"prompt": "a", "tools": value}])
    with pytest.raises(DataError, match=rf"p\.jsonl:1: {message}"):
        PromptFile(path, input_key="prompt", label_key=None, tool_key="tools")


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=40),
    block=st.integers(1, 50),
    last=st.booleans(),
    bounds=st.tuples(st.none() | st.integers(-45, 45), st.none() | st.integers(-45, 45)),
)
def test_blocks_of_any_size_hold_every_row_once(
    lengths: list[int],
    block: int,
    last: bool,
    bounds: tuple[int | None, int | None],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Lines longer than blocks, empty lines, and a last line with and without a newline."""
    path = tmp_path_factory.mktemp("blocks") / "p.jsonl"
    lines = ["" if length == 0 else json.dumps({"prompt": f"{n}" + "x" * length}) for n, length in enumerate(lengths)]
    path.write_text("\n".join(lines) + ("\n" if last else ""))
    used = [json.loads(line)["prompt"] for line in lines if line][slice(*bounds)]
    text = f"{path}@[{':'.join('' if bound is None else str(bound) for bound in bounds)}]"
    columns = Columns("prompt", None)
    sizes = json_lines.BLOCK, json_lines._STRIDE
    json_lines.BLOCK, json_lines._STRIDE = block, 7
    try:
        if not used:
            with pytest.raises(DataError, match=r"has no rows|is empty"):
                opened(text, columns=columns)
            return
        reader = opened(text, columns=columns)
        assert in_blocks(reader) == used
        positions = [position for number in range(reader.blocks) for position, _ in reader.block(number)]
        numbers = [number + 1 for number, line in enumerate(lines) if line][slice(*bounds)]
        assert [reader.where(position) for position in positions] == [f"{reader.name}:{number}" for number in numbers]
    finally:
        json_lines.BLOCK, json_lines._STRIDE = sizes


def test_a_large_row_group_is_read_in_parts(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "parquet", numbered(3000), group=2500)
    reader = opened(path)
    assert [reader.parts(block) for block in range(reader.blocks)] == [3, 1]
    cut = opened(f"{path}@[2400:2600]")
    assert [len(cut.block(block)) for block in range(cut.blocks)] == [100, 100]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04rest", "is a zip file, expected JSON lines .* unpack it first"),
        (b"\x28\xb5\x2f\xfdrest", "is a zstd file"),
        ("ü".encode("utf-16"), "is text in UTF-16, expected UTF-8"),
        (b"\x7fELF\0\0\0", "is a binary file, expected JSON lines"),
        (b"PAR1 and nothing else", "is not a valid Parquet file"),
        (gzip.compress(b'{"prompt": "a", "label": "b"}\n' * 999, mtime=0)[:-20], "ends too early: it is truncated"),
        (gzip.compress(b"x", mtime=0)[:12] + b"\xff" * 30, "is a damaged gzip file"),
        (gzip.compress(b"", mtime=0), "has no rows"),
        (b'{"prompt": "\xff", "label": "b"}\n', r":1 is not UTF-8: .* at byte 12 of the line: .*"),
    ],
)
@pytest.mark.parametrize("by_block", [True, False])
def test_the_error_for_another_kind_of_file_names_the_kind(
    content: bytes, message: str, by_block: bool, tmp_path: Path
) -> None:
    path = tmp_path / "p"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        if by_block:
            for _, row in opened(path).block(0):
                if isinstance(row, BadRow):
                    raise DataError(f"{path}:1{row.reason}")
        else:
            PromptFile(path, input_key="prompt", label_key="label")


def test_a_text_file_that_ends_in_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_text("prompt,label\n")
    with pytest.raises(DataError, match=r"p\.parquet is not a valid Parquet file"):
        opened(tmp_path / "p.parquet")


@pytest.mark.parametrize("kind", ["parquet", "folder"])
@pytest.mark.parametrize("by_block", [True, False])
def test_a_missing_column_is_named_with_the_nearest_one(kind: str, by_block: bool, tmp_path: Path) -> None:
    path = write_rows(tmp_path, kind, [{"promt": "a", "label": "b"}])
    with pytest.raises(DataError, match=r"no column 'prompt' \(--input-key\). Its columns: .*Did you mean promt\?"):
        opened(path, by_block=by_block)


def test_rows_of_a_table_are_named_by_their_number(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "parquet", [{"prompt": "a", "label": "b"}, {"prompt": "", "label": "b"}])
    with pytest.raises(DataError, match=r"p\.parquet: row 1: 'prompt' is an empty string"):
        PromptFile(path, input_key="prompt", label_key="label")


def test_metadata_that_json_cannot_express_makes_a_bad_row(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "parquet", [{"prompt": "a", "label": "b", "metadata": {"k": b"bytes"}}])
    with pytest.raises(DataError, match="row 0: 'metadata' cannot be stored as JSON"):
        PromptFile(path, input_key="prompt", label_key="label")


def _not_utf8() -> pa.Table:
    """Three rows; the text of the second is not UTF-8, which Arrow does not check."""
    raw = pa.array([b"one", b"t\xffo", b"three"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    return pa.table({"prompt": texts, "label": ["1", "2", "3"]})


@pytest.mark.parametrize("kind", ["unpacked", "groups", "folder"])
def test_text_in_a_table_that_is_not_utf8_makes_a_bad_row(kind: str, tmp_path: Path) -> None:
    if kind == "folder":
        import datasets

        datasets.Dataset(_not_utf8()).save_to_disk(tmp_path / "p")
        reader = opened(tmp_path / "p")
    else:
        pq.write_table(_not_utf8(), tmp_path / "p.parquet")
        reader = opened(tmp_path / "p.parquet", by_block=kind == "groups")
    one, two, three = (row for _, row in reader.scan())
    assert isinstance(two, BadRow) and "not valid UTF-8: invalid start byte at byte 1" in two.reason
    assert not isinstance(one, BadRow) and not isinstance(three, BadRow)
    assert (one.prompt, three.prompt) == ("one", "three")
    reader.close()


def test_the_error_for_a_line_that_is_not_utf8_says_so(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9", "label": "1"}\n')
    [(_, row)] = opened(path).scan()
    assert isinstance(row, BadRow) and row.reason.startswith(" is not UTF-8: invalid continuation byte at byte 15")


@pytest.mark.parametrize("by_block", [False, True])
def test_the_error_for_a_damaged_parquet_page_names_the_file(by_block: bool, tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": [f"q{n}" for n in range(9000)], "label": ["1"] * 9000}), path)
    content = bytearray(path.read_bytes())
    content[1000:1400] = bytes(400)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"p\.parquet is not a valid Parquet file"):
        list(opened(path, by_block=by_block).scan())


def test_a_prompt_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "parquet", [{"prompt": b"a", "label": "b"}])
    with pytest.raises(DataError, match="row 0: 'prompt' is a bytes, expected a string or a list"):
        PromptFile(path, input_key="prompt", label_key="label")


def test_a_split_of_a_saved_data_set_can_be_chosen(tmp_path: Path) -> None:
    import datasets

    parts = {name: datasets.Dataset.from_list(numbered(3, first)) for name, first in (("train", 0), ("test", 5))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")
    assert in_blocks(opened(tmp_path / "d")) == ["q0", "q1", "q2"]
    assert in_blocks(opened(f"{tmp_path}/d?split=test")) == ["q5", "q6", "q7"]
    assert in_blocks(opened(f"{tmp_path}/d/test@[1:]")) == ["q6", "q7"]
    with pytest.raises(DataError, match=r"no split 'tst'. Its splits: train, test.*Did you mean test\?"):
        opened(f"{tmp_path}/d?split=tst")
    with pytest.raises(DataError, match="got 'splt' after the question mark, expected config or split"):
        opened(f"{tmp_path}/d?splt=test")


def test_a_folder_of_files_is_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "d"
    folder.mkdir()
    write_rows(folder, "jsonl", numbered(3), name="train")
    assert in_blocks(opened(folder)) == ["q0", "q1", "q2"]


def test_the_error_for_an_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: Any) -> Any:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"hf://org/name cannot be fetched .*Couldn't reach.*name its folder"):
        opened("hf://org/name")


def test_a_hub_name_without_its_prefix_gets_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"org/name does not exist.*Hub is hf://org/name"):
        opened("org/name")
