"""The tables of formats, lengths and JSON, in every combination of their options."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tests.rewards.tables import formats
from tests.support.rewards import ask, build, score

from slime.testing import make_sample


def test_the_tables_are_long_and_have_hits_and_misses() -> None:
    hits = [row[2] for row in [*formats.TAGS, *formats.PATTERNS]]
    lengths = len(formats.LENGTHS) * 3
    fits = [row[3] for row in formats.JSON]
    assert (len(hits) >= 60, lengths >= 60, len(fits) >= 60) == (True, True, True)
    assert min(hits.count(True), hits.count(False), fits.count(True), fits.count(False)) >= 20


@pytest.mark.parametrize(("hit", "miss"), [(1.0, 0.0), (0.2, -1.0)])
def test_formats(hit: float, miss: float) -> None:
    wrong: list[Any] = []
    for tags, response, good, share in formats.TAGS:
        reward = score("format", response, tags=tags, hit=hit, miss=miss)
        if (reward.value, reward.parts) != (hit if good else miss, {"tags": share}):
            wrong.append((tags, response, reward))
    for pattern, response, good in formats.PATTERNS:
        reward = score("format", response, pattern=pattern, hit=hit, miss=miss)
        if reward.value != (hit if good else miss):
            wrong.append((pattern, response, reward))
    assert wrong == []


@pytest.mark.parametrize(("shape", "column"), [("linear", 3), ("cosine", 4), ("overlong", 5)])
def test_lengths(shape: str, column: int) -> None:
    wrong: list[Any] = []
    for row in formats.LENGTHS:
        sample = make_sample("q", "", index=7)
        sample.response_length = row[0]
        [reward] = ask(build("length", shape=shape, free=row[1], limit=row[2]), [sample])
        if reward.value != pytest.approx(row[column], abs=1e-12):
            wrong.append((row, reward))
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize(("parses", "fenced"), [*itertools.product((0.0, 0.25), (True, False))])
def test_json(parses: float, fenced: bool, tmp_path: Path) -> None:
    """Each row with its schema in metadata as an object and as text, under another key, and in a file."""
    wrong: list[Any] = []
    options: dict[str, Any] = {"parses": parses, "fenced": fenced}
    for schema, response, is_json, fits in formats.JSON:
        (tmp_path / "schema.json").write_text(json.dumps(schema), encoding="utf-8")
        ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"json_schema": schema}, {}),
            ({"json_schema": None if schema is None else json.dumps(schema)}, {}),
            ({"other": schema, "json_schema": False}, {"metadata_key": "other"}),
        ]
        if schema is not None:
            ways.append(({"json_schema": False}, {"path": str(tmp_path / "schema.json")}))
        for metadata, more in ways:
            reward = score("json_schema", response, metadata=metadata, **options, **more)
            expected = 1.0 if fits else parses if is_json else 0.0
            if (reward.value, reward.parts) != (expected, {"parses": float(is_json)}):
                wrong.append((schema, response, metadata, more, reward))
    assert wrong == []


@pytest.mark.parametrize("fenced", [True, False])
def test_json_in_blocks(fenced: bool) -> None:
    got = [score("json_schema", text, fenced=fenced).value for text, _, _ in formats.FENCES]
    assert got == [float(inside if fenced else outside) for _, inside, outside in formats.FENCES]
