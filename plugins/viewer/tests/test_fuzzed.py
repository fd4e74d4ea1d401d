"""Whatever stands in a filter or in a sample's fields, it is an answer or an error of ours, never a traceback."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.observe.terminal import printable
from slime_viewer import answers, queries
from slime_viewer.filters import FIELDS, FilterError, read_filter
from slime_viewer.index import RunIndex
from slime_viewer.report import export_page
from slime_viewer.run_files import RunFolder
from slime_viewer.show_command import _sample

TERMS = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["", "-", " "]),
    st.sampled_from([*FIELDS, "", "nothing", "'"]),
    st.sampled_from(["<", "<=", ">", ">=", "=", "!=", ":", "", "::", '"']),
    st.one_of(st.text(max_size=12), st.sampled_from(["1", "-0.5", "1..2", "none", "any", "train", "1e999", '"a b"'])),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
#: the fields that are read by name, of any type
ROWS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("group", "index", "reward", "status", "prompt", "response", "label", "messages"), JSON),
        **dict.fromkeys(("weight_versions", "failure", "dropped", "response_tokens", "metrics", "finish_reason"), JSON),
    },
)


def index_of(folder: Path, lines: list[bytes]) -> RunIndex:
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / "000000.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    index = RunIndex(RunFolder(folder), None)
    index.refresh()
    return index


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(TERMS, max_size=4).map(" ".join) | st.text())
def test_any_filter_is_answered_or_refused(line: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        index = index_of(Path(name), [b'{"reward": 1}'])
        try:
            condition = read_filter(line)
        except FilterError as error:
            assert str(error).startswith("filter, column ")
        else:
            assert queries.count(index, condition) in (0, 1)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(ROWS, min_size=1, max_size=4), st.binary(max_size=40))
def test_any_sample_is_shown_or_counted(rows: list[dict[str, Any]], noise: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        broken = noise.replace(b"\n", b"") + b"x"
        index = index_of(Path(name), [*(json.dumps(row).encode() for row in rows), broken])
        told = sum(int(text.split()[1]) for text in index.state().problems)
        found = answers.samples_answer(index, "", "reward", 0, 50)
        assert found["total"] + told == len(rows) + 1
        orjson.dumps(found)
        for row in found["rows"]:
            orjson.dumps(answers.sample_answer(index, row["key"]))
            orjson.dumps(answers.group_answer(index, row["group_key"]))
            orjson.dumps(answers.prompt_answer(index, row["prompt"]))
        for one in queries.find(index, read_filter("")):
            printable("\n".join(_sample(one, full=True)))
        export_page(index, "", "step")
