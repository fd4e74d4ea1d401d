"""Numbers, dates and what is missing: labels and metadata hold what the file shows, in every format."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.prompt_files import write_rows

from slime.errors import DataError
from slime.kit.readers import PromptFile, PromptRow

FIB_100 = 354224848179261915075


def read_text(folder: Path, *lines: str, **keys: Any) -> list[PromptRow]:
    path = folder / "p.jsonl"
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return list(PromptFile(path, **{"input_key": "prompt", "label_key": "label"} | keys))


def read_table(folder: Path, kind: str, **columns: Any) -> list[PromptRow]:
    table = pa.table({"prompt": ["q"] * len(next(iter(columns.values()))), **columns})
    path = folder / ("t.parquet" if kind == "parquet" else "t")
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        import datasets

        datasets.Dataset(table).save_to_disk(path)
    label_key = "label" if "label" in columns else None
    return list(PromptFile(path, input_key="prompt", label_key=label_key))


@pytest.mark.parametrize(
    "number",
    [
        "18446744073709551615",
        "18446744073709551616",
        "-9223372036854775809",
        str(FIB_100),
        "7" * 400,
        "1.0",
        "0.10",
        "1e5",
        "3.14159265358979323846",
        "1e22",
        "-0.0",
        "0",
    ],
)
def test_a_number_of_json_lines_is_a_label_as_it_is_written(tmp_path: Path, number: str) -> None:
    [row] = read_text(tmp_path, f'{{"prompt": "q", "label": {number}, "metadata": {{"label": 1}}}}')
    [nested] = read_text(tmp_path, f'{{"prompt": "q", "reward": {{"truth": {number}}}}}', label_key="reward.truth")
    assert row.label == nested.label == number


#: beyond floats, beside digits that are no number
BEYOND = [-(10**400), *(10**1200 + n for n in range(100)), " " + "7" * 400, "\\u" + "1" * 400]


@pytest.mark.parametrize(
    "value", [2**64, -(2**63) - 1, [FIB_100, "x"], {"cases": [{"in": 10**30}]}, 0.1, 2**53 + 1, BEYOND]
)
def test_numbers_in_metadata_keep_their_digits(tmp_path: Path, value: Any) -> None:
    [row] = read_text(tmp_path, json.dumps({"prompt": "é\u2028", "label": "1", "metadata": {"n": value}}))
    assert (row.metadata, row.prompt) == ({"n": value}, "é\u2028")


#: a column of a table, and its labels
COLUMNS: list[tuple[pa.Array, list[str]]] = [
    (pa.array([0.1, 2.5, 1.0], pa.float32()), ["0.1", "2.5", "1"]),
    (pa.array([1.0, 0.1, -3.0, 2.0**53]), ["1", "0.1", "-3", "9007199254740992"]),
    (pa.array([6.022e23, 1.5e16, -5.97e24, 1e20]), ["6.022e+23", "1.5e+16", "-5.97e+24", "1e+20"]),
    (pa.array([1, -2], pa.int8()), ["1", "-2"]),
    (pa.array([2**64 - 1], pa.uint64()), ["18446744073709551615"]),
    (pa.array([Decimal(FIB_100)], pa.decimal128(38, 0)), [str(FIB_100)]),
    (pa.array([Decimal("1.10"), Decimal("0")], pa.decimal128(9, 2)), ["1.10", "0.00"]),
    (pa.array([datetime.date(2024, 2, 29)]), ["2024-02-29"]),
]
#: what `datasets` cannot save
HALF = pa.array([0.1, 1.0], pa.float16()), ["0.1", "1"]


@pytest.mark.parametrize(
    ("kind", "column", "labels"),
    [*((kind, *one) for kind in ("parquet", "folder") for one in COLUMNS), ("parquet", *HALF)],
)
def test_a_column_of_a_table_is_text_as_its_owner_sees_it(
    tmp_path: Path, kind: str, column: pa.Array, labels: list[str]
) -> None:
    assert [row.label for row in read_table(tmp_path, kind, label=column)] == labels


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_metadata_of_a_table_is_json(tmp_path: Path, kind: str) -> None:
    kinds = pa.struct(
        [
            ("short", pa.list_(pa.float32())),
            ("large", pa.decimal128(38, 0)),
            ("price", pa.decimal128(9, 2)),
            ("day", pa.date32()),
            ("at", pa.timestamp("us")),
            ("none", pa.float64()),
            ("yes", pa.bool_()),
        ]
    )
    at = datetime.datetime(2024, 2, 29, 1, 2, 3)
    row = {
        "short": [0.1, None],
        "large": Decimal(FIB_100),
        "price": Decimal("2.50"),
        "day": datetime.date(2024, 2, 29),
        "at": at,
        "none": float("nan"),
        "yes": True,
    }
    [read] = read_table(tmp_path, kind, metadata=pa.array([row], kinds))
    assert read.metadata == {
        "short": [0.1, None],
        "large": FIB_100,
        "price": "2.50",
        "day": "2024-02-29",
        "at": "2024-02-29T01:02:03",
        "none": None,
        "yes": True,
    }


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([float("nan")]), "row 0: 'label' is null"),
        (pa.array([1.2345678901234567e19]), r"row 0: 'label' is the float 1\.2345678901234567e\+19, whose last digits"),
        (pa.array([float("inf")]), "row 0: 'label' is infinity, expected a number"),
        (pa.array([True]), "row 0: 'label' is a boolean"),
        (pa.array([b"1"]), "row 0: 'label' is a bytes"),
    ],
)
def test_a_label_that_is_not_known_is_refused(tmp_path: Path, column: pa.Array, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_table(tmp_path, "parquet", label=column)


def test_a_large_float_is_no_integer_that_lost_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"prompt": "q", "label": 6.022e23, "metadata": {"n": [5.97e24]}}\n')
    [row] = PromptFile(folder, input_key="prompt", label_key="label")
    assert (row.label, row.metadata) == ("6.022e+23", {"n": [5.97e24]})


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_what_is_beside_a_used_field_may_be_anything(tmp_path: Path, kind: str) -> None:
    extra = {
        "answer": Decimal("1.50"),
        "image": b"x",
        "far": float("inf"),
        "meta": {"day": datetime.date(2024, 2, 29)},
    }
    table = pa.table({"prompt": ["q"], "extra": [extra]})
    path = tmp_path / "t"
    if kind == "parquet":
        pq.write_table(table, path := tmp_path / "t.parquet")
    else:
        import datasets

        datasets.Dataset(table).save_to_disk(path)
    keys: dict[str, Any] = {"input_key": "prompt", "label_key": "extra.answer"}
    [row] = PromptFile(path, **keys, metadata_key="extra.meta")
    assert (row.label, row.metadata) == ("1.50", {"day": "2024-02-29"})
    with pytest.raises(DataError, match="row 0: 'extra' cannot be stored as JSON"):
        PromptFile(path, **keys, metadata_key="extra")


def test_metadata_without_bounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 0: 'metadata' cannot be stored as JSON: infinity"):
        read_table(tmp_path, "parquet", metadata=[{"k": float("inf")}])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"label": 1e400', "number is infinity when parsed as double: write it as a string"),
        (f'"label": {"1" * 20}, "metadata": {{"n": 1e400}}', "number is infinity"),
        ('"label": NaN', "JSON has no NaN: write null, or a string at column"),
        ('"label": -Infinity', "JSON has no -Infinity"),
        (f'"label": "1", "metadata": {{"a": {"1" * 20}, "b": NaN}}', "JSON has no NaN"),
        (f'"label": "1", "metadata": {{"n": {"1" * 5000}}}', "a number of 5000 digits is too long"),
        (f'"label": {"1" * 20}, "metadata": {{"s": "\\ud800"}}', "no low surrogate in string"),
        (f'"label": {"1" * 20}, "metadata": {"[" * 5000}', "depth limit exceeded"),
        (f'"label": {"1" * 20}, "metadata": {"[" * 1000}{"]" * 1000}', "depth limit exceeded"),
        ('"label": "1", "label": "2"', "has the key 'label' twice in one object"),
        (f'"label": {"1" * 20}, "label": "2"', "has the key 'label' twice in one object"),
    ],
)
def test_a_line_of_which_readers_disagree_is_refused(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"p\.jsonl:2 .*{message}"):
        read_text(tmp_path, '{"prompt": "a", "label": "b"}', f'{{"prompt": "q", {line}}}')


LARGE = '{"prompt": "18446744073709551616 NaN 1e400", "label": 18446744073709551616, "metadata": '


@pytest.mark.parametrize(
    ("metadata", "mark"),
    [
        ('{"s": "1e400", "n": 1e400}', "1e400}"),
        ('{"s": "\\"NaN", "n": [1, NaN]}', "NaN]"),
        ('{"n": -Infinity}', "-Inf"),
        ('{"n": ' + "1" * 5000 + "}", "1" * 5000),
        (r'{"s": "\\ud800 \ud83d\ude00 é", "n": "\ude00"}', r'\ude00"}'),
        ('{"n": [' + "1" * 400 + ", -" + "1" * 400 + ', "é", NaN]}', "NaN]"),
    ],
)
def test_the_column_of_what_is_wrong_is_named(tmp_path: Path, metadata: str, mark: str) -> None:
    line = f"{LARGE}{metadata}}}"
    with pytest.raises(DataError, match=rf"at column {line.rindex(mark) + 1}: "):
        read_text(tmp_path, line)


@pytest.mark.parametrize("label", ["1", "1" * 20])
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tool_key": "extra.name"}, None),
        ({"tool_key": "other.again"}, "has the key 'again' twice in one object"),
        ({"metadata_key": "again"}, "has the key 'again' twice in one object"),
    ],
)
def test_only_keys_that_are_read_may_not_be_there_twice(
    tmp_path: Path, label: str, keys: dict[str, str], message: str | None
) -> None:
    name = '"extra": {"name": [{"name": "f"}, {"name": "g"}]}, "other": {"again": null, "again": null}'
    line = f'{{"prompt": "q", "label": {label}, {name}}}'
    if message is None:
        [row] = read_text(tmp_path, line, **keys)
        assert row.tools == [{"name": "f"}, {"name": "g"}]
    else:
        with pytest.raises(DataError, match=message):
            read_text(tmp_path, line, **keys)


def test_a_row_without_repeated_keys_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.kit.readers.json_text.json.loads", None)
    line = '{"prompt": "q", "label": "1", "extra": {"name": [{"name": "f"}, {"name": "g"}]}}'
    [row] = read_text(tmp_path, line, tool_key="extra.name")
    assert row.tools == [{"name": "f"}, {"name": "g"}]


def test_marks_and_line_ends_of_other_systems_are_no_content(tmp_path: Path) -> None:
    rows = read_text(
        tmp_path, '\ufeff{"prompt": "a", "label": 18446744073709551616}\r', "\r", '{"prompt": "b", "label": 2}\r'
    )
    assert [(row.prompt, row.label) for row in rows] == [("a", "18446744073709551616"), ("b", "2")]


def test_digits_that_a_library_lost_are_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "d"
    folder.mkdir()
    for number, place in (("label", {"label": FIB_100}), ("metadata", {"label": 1, "metadata": {"n": [2**64]}})):
        (folder / "train.jsonl").write_text(json.dumps({"prompt": number, **place}) + "\n")
        with pytest.raises(DataError, match=r"row 0: a number of more than 64 bits .*Name the JSON lines file"):
            PromptFile(folder, input_key="prompt", label_key="label")


VERL = {"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": 2, "style": "rule"}}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
@pytest.mark.parametrize(
    "label_key", ["reward_model.ground_truth", "reward_model.truth", "reward_model.ground_truth.x"]
)
def test_keys_lead_into_columns(tmp_path: Path, kind: str, label_key: str) -> None:
    inner = {"question": "1+1=", "meta": {"k": 0.5}, "tools": [{"name": "f"}]}
    path = write_rows(tmp_path, kind, [VERL | {"extra": inner, "a.b": "plain", "a": {"b": "nested"}}])
    keys: dict[str, Any] = {"metadata_key": "extra.meta", "tool_key": "extra.tools"}
    if label_key != "reward_model.ground_truth":
        what = "key" if kind == "jsonl" else "column"
        inside = (
            "'reward_model.ground_truth' is no object"
            if label_key.endswith("x")
            else ("Keys of 'reward_model': 'ground_truth', 'style'")
        )
        said = rf"has no {what} '{label_key}' \(--label-key\). Its {what}s: 'prompt'"
        message = rf"{said}.*{inside}.*reward_model.ground_truth\?"
        with pytest.raises(DataError, match=message):
            PromptFile(path, input_key="prompt", label_key=label_key)
        return
    [row] = PromptFile(path, input_key="extra.question", label_key=label_key, **keys)
    assert (row.prompt, row.label, row.tools) == ("1+1=", "2", inner["tools"])
    assert row.metadata == {"k": 0.5, "tools": inner["tools"]}
    [literal] = PromptFile(path, input_key="a.b", label_key=None)
    assert literal.prompt == "plain"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_keys_of_a_known_schema_are_suggested(tmp_path: Path, kind: str) -> None:
    path = write_rows(tmp_path, kind, [VERL])
    with pytest.raises(DataError, match=r"Did you mean --label-key reward_model\.ground_truth\?"):
        PromptFile(path, input_key="prompt", label_key="label")
    with pytest.raises(DataError, match="'reward_model' is an object with the keys 'ground_truth', 'style'"):
        PromptFile(path, input_key="prompt", label_key="reward_model")


def test_a_column_that_a_table_has_twice_is_refused(tmp_path: Path) -> None:
    pq.write_table(
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["prompt", "prompt"]), tmp_path / "t.parquet"
    )
    with pytest.raises(DataError, match=r"t\.parquet has two columns 'prompt'"):
        PromptFile(tmp_path / "t.parquet", input_key="prompt", label_key=None)
