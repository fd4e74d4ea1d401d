"""How prompt files are named: slices and weights."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from slime.errors import DataError
from slime.kit.readers.prompt_source import PromptSource, parse_source, parse_sources


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("a.jsonl", PromptSource("a.jsonl")),
        ("a.jsonl@[2:10]", PromptSource("a.jsonl", 2, 10)),
        ("a.jsonl@[-500:]", PromptSource("a.jsonl", -500, None)),
        ("a.jsonl@[:-1]=0.7", PromptSource("a.jsonl", None, -1, Fraction(7, 10))),
        ("dir=5/a.jsonl", PromptSource("dir=5/a.jsonl")),
        ("hf://org/name?config=2", PromptSource("hf://org/name?config=2")),
        (
            "hf://org/name?split=train&config=2=3",
            PromptSource("hf://org/name?split=train&config=2", weight=Fraction(3)),
        ),
        ("hf://org/name?split=train@[0:5]=2", PromptSource("hf://org/name?split=train", 0, 5, Fraction(2))),
    ],
)
def test_a_file_may_have_a_slice_and_a_weight(text: str, source: PromptSource) -> None:
    assert parse_source(text) == source


def test_an_existing_file_with_that_very_name_takes_precedence(tmp_path: Path) -> None:
    path = tmp_path / "x@[1:2]=3"
    path.touch()
    assert parse_source(str(path)) == PromptSource(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.jsonl@[5]", r"got the slice @\[5\], expected @\[START:STOP\]"),
        ("a.jsonl@[1:2:3]", r"got the slice @\[1:2:3\]"),
        ("a.jsonl@[a:b]", r"got the slice @\[a:b\]"),
        ("a.jsonl@[-:3]", r"got the slice @\[-:3\]"),
        ("a.jsonl@[1:2]x", "a slice goes at the end of the file name"),
        ("a.jsonl=0", "got the weight 0, expected a number above 0"),
        ("a.jsonl=-1", "got the weight -1"),
        ("a.jsonl=nan", "got the weight nan"),
        ("a.jsonl=inf", "got the weight inf"),
        ("a.jsonl@[0:1]=heavy", "got the weight 'heavy', expected a number above 0"),
        (" ", "empty name"),
    ],
)
def test_a_malformed_slice_or_weight_is_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_source(text)


def test_either_all_files_have_weights_or_none() -> None:
    with pytest.raises(DataError, match=r"b.jsonl has no weight and a.jsonl has one"):
        parse_sources(["a.jsonl=1", "b.jsonl"])
    assert [source.weight for source in parse_sources(["a.jsonl=1", "b.jsonl=3"])] == [1, 3]


def test_a_file_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    (tmp_path / "link.jsonl").symlink_to(path)
    with pytest.raises(DataError, match=r"link\.jsonl is named twice: name it once, with the sum of its weights"):
        parse_sources([f"{path}=1", f"{tmp_path}/link.jsonl=2"])
    assert len(parse_sources([f"{path}@[0:5]", f"{path}@[5:10]"])) == 2


@pytest.mark.parametrize(
    ("start", "stop", "rows", "bounds"), [(None, None, 5, (0, 5)), (-2, None, 5, (3, 5)), (1, 99, 5, (1, 5))]
)
def test_slices_work_as_in_python(start: int | None, stop: int | None, rows: int, bounds: tuple[int, int]) -> None:
    assert PromptSource("f", start, stop).bounds(rows) == bounds


def test_a_slice_without_rows_is_refused() -> None:
    with pytest.raises(DataError, match=r"f@\[7:9\] is empty: f has 5 rows"):
        PromptSource("f", 7, 9).bounds(5)
