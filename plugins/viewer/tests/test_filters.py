"""The filter line: what it finds, and what it says when it cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from plugins.viewer.tests.making import make_run

from slime_viewer.filters import FilterError, read_filter
from slime_viewer.index import RunIndex
from slime_viewer.queries import count
from slime_viewer.run_files import RunFolder


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunIndex]:
    """6 steps of 3 groups of 4 samples, one dropped sample in step 2, an evaluation of 3 samples."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "run", dropped=[2])
    made = RunIndex(RunFolder(folder), None)
    made.refresh()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("", 76),
        ("kind:train", 72),
        ("kind:train,eval", 75),
        ("kind!=train", 4),
        ("-kind:train", 4),
        ("step:1..2 kind:train", 24),
        ("step>3 kind:train", 24),
        ("step<=0", 12),
        ("kind:dropped", 1),
        ('dropped:"all equal"', 1),
        ("dropped:any", 1),
        ("dropped:none", 75),
        ("set:held_out", 3),
        ("kind:train step=0 reward=1", 6),
        ("kind:train step=0 -reward=1", 6),
        ("kind:train step=0 reward<0.5", 6),
        ("reward:none", 0),
        ("group=4", 4),
        ("version=6", 12),
        ("status:completed tokens=5", 76),
        ("failure:none", 76),
        ('"carry the 2"', 18),
        ('kind:train "what is 2+2" "carry the 2"', 6),
        ("CARRY", 76),
        ("-carry", 0),
        ("nothing_of_the_kind", 0),
    ],
)
def test_a_filter_finds_the_samples_that_it_describes(index: RunIndex, line: str, number: int) -> None:
    assert count(index, read_filter(line)) == number


def test_a_condition_knows_whether_it_is_about_kinds() -> None:
    assert read_filter("step>1 -kind:train").of_kind and read_filter("kind:eval step>1").of_kind
    assert not read_filter('kind set:kind "kind:eval"').of_kind


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("step>2 rewrd<1", r"column 8: rewrd<1: there is no field 'rewrd'. Did you mean reward\? Fields: reward, step"),
        ("reward<high", "'high' is not a number; expected a number, a range such as 10..20, or none"),
        ("reward<nan", "'nan' is not a number"),
        ("step:1..x", "'x' is not a number"),
        ("reward<", "has no value; expected something like reward<0.5"),
        ('step>2 "carry', 'column 8: "carry has no closing "'),
        ("status:trunc", "status is one of pending, completed, truncated, aborted, failed. Did you mean truncated?"),
        ("status<failed", "this field is a text; expected : or = or != instead of <"),
        ('"=="', "has no letter or digit to search for"),
    ],
)
def test_a_filter_that_cannot_be_read_says_where_and_what_was_expected(line: str, told: str) -> None:
    with pytest.raises(FilterError) as raised:
        read_filter(line)
    assert told.replace("\\?", "?") in str(raised.value)


@pytest.mark.parametrize(
    "line", ["x' OR 1=1 --", '"a"" OR b"', "NEAR(a b)", '"a* OR b"', "'", "set:x');DROP", "a\0b", "\udcff"]
)
def test_what_is_typed_is_never_run_as_sql(index: RunIndex, line: str) -> None:
    with suppress(FilterError):
        assert count(index, read_filter(line)) == 0
    assert count(index, read_filter("kind:train")) == 72


def test_words_of_scripts_without_spaces_are_found(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    path = folder / "rollouts" / "000000.jsonl"
    path.write_text(path.read_text() + '{"prompt": "東京の人口は", "response": "約千四百万人です", "reward": 1}\n')
    index = RunIndex(RunFolder(folder), None)
    index.refresh()
    assert [count(index, read_filter(word)) for word in ("人口", '"千四百万"', "人日")] == [1, 1, 0]
