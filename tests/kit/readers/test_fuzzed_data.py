"""Any bytes in a data file give rows or a `DataError`, never another exception: at least 10,000 cases a format."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.errors import DataError
from slime.kit.readers import PromptFile
from slime.kit.readers.prompt_source import parse_source

pytestmark = pytest.mark.nightly

many = settings(
    max_examples=3_000, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True
)
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**70,
    1.5,
    float("nan"),
    "",
    "a",
    "\ud800",
    "\0",
    [],
    {},
    [1],
    ["a"],
    {"x": []},
]
VALUES += [[{"role": "user", "content": "a"}], [{"role": 1, "content": None}], [{}], '[{"role": "a", "content": ""}]']
ODD = [b"{", b"[", b"\xef\xbb\xbf{}", b"\xff\xfe", b"[" * 3000, b"1e999k", b"{'a': 1}"]
KEYS = ["prompt", "label", "metadata", "tools", "x"]


def lines(drawn: random.Random) -> bytes:
    """Lines of which some are rows; some bytes of them are damaged."""
    found = []
    for _ in range(drawn.randint(0, 4)):
        match drawn.choice("rrrrrvbo"):
            case "r":
                keys = drawn.sample(KEYS, drawn.randint(0, 5))
                found.append(json.dumps({key: drawn.choice(VALUES) for key in keys}).encode())
            case "v":
                found.append(json.dumps(drawn.choice(VALUES)).encode())
            case "b":
                found.append(drawn.randbytes(drawn.randint(0, 20)))
            case "o":
                found.append(
                    drawn.choice([b"{", b"[", b"\xef\xbb\xbf{}", b"\xff\xfe", b"[" * 3000, b"1e999k", b"{'a': 1}"])
                )
    content = b"\n".join(found)
    return damaged(content, drawn.getrandbits(32)) if drawn.random() < 0.5 else content


seeds = st.integers(0, 2**32 - 1)


def damaged(content: bytes, seed: int) -> bytes:
    """Bytes of which some are replaced, removed or added.

    hypothesis draws only the seed: drawing each change would take ten times longer than reading the file.
    """
    drawn, changed = random.Random(seed), bytearray(content)
    for _ in range(drawn.randint(0, 4)):
        where = drawn.randrange(max(1, len(changed)))
        match drawn.choice("rrrdtc"):
            case "r":
                changed[where : where + 1] = drawn.randbytes(1)
            case "d":
                del changed[where : where + drawn.randint(1, 20)]
            case "t":
                del changed[where:]
            case "c":
                changed[where:where] = drawn.randbytes(drawn.randint(1, 8))
    return bytes(changed)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Do not log thousands of rows that are left out."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def read(path: Path, columns: dict[str, Any]) -> None:
    """Read everything in both modes; a `DataError` has a message in plain text."""
    with contextlib.suppress(DataError):
        try:
            file = PromptFile(path, **columns)
        except DataError as error:
            assert str(error) and "Traceback" not in str(error)
            raise
        try:
            assert all(isinstance(row.prompt, str | list) for row in file)
        finally:
            file.close()


columns = st.sampled_from(
    [
        {"input_key": input_key, "label_key": label_key} | more
        for input_key in ("prompt", "x")
        for label_key in (None, "label")
        for more in ({}, {"max_bad_rows": 100, "tool_key": "tools"})
    ]
)


@many
@given(seed=seeds, keys=columns)
def test_any_json_lines(tmp_path_factory: pytest.TempPathFactory, seed: int, keys: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(lines(random.Random(seed)))
    read(path, keys)


GZIP = gzip.compress(b'{"prompt": "a", "label": "b"}\n' * 3, mtime=0)


@many
@given(seed=seeds, keys=columns)
def test_any_gzip_file(tmp_path_factory: pytest.TempPathFactory, seed: int, keys: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl.gz"
    path.write_bytes(damaged(GZIP, seed))
    read(path, keys)


def _parquet() -> bytes:
    target = io.BytesIO()
    table = pa.table(
        {
            "prompt": ["a", "b", None],
            "label": ["1", "2", "3"],
            "metadata": [{"k": [1, 2]}, None, {"k": []}],
            "x": [[{"role": "user", "content": "c"}], None, []],
        }
    )
    pq.write_table(table, target, compression="none")
    return target.getvalue()


PARQUET = _parquet()


@many
@given(seed=seeds, keys=columns)
def test_any_parquet_file(tmp_path_factory: pytest.TempPathFactory, seed: int, keys: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.parquet"
    path.write_bytes(damaged(PARQUET, seed))
    read(path, keys)


@many
@given(
    text=st.text(max_size=30) | st.from_regex(r"[a/.\0]{0,4}(@\[[-0-9:x]{0,6}\])?(=[-0-9.einfk]{0,8})?", fullmatch=True)
)
def test_any_name_of_a_prompt_file(text: str) -> None:
    with contextlib.suppress(DataError):
        source = parse_source(text)
        assert source.weight is None or source.weight > 0
