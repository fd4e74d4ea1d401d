"""Responses against JSON schemas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.rewards import build, score

from slime.errors import ConfigError

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 3}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("response", "value", "parses"),
    [
        ('{"n": 1}', 1.0, 1.0),
        ('Sure:\n```json\n{"n": 1, "s": "abc"}\n```\nDone', 1.0, 1.0),
        ('{"n": "1"}', 0.0, 1.0),
        ('{"n": 1, "x": 2}', 0.0, 1.0),
        ('{"n": 1', 0.0, 0.0),
        ('{"n": NaN}', 0.0, 0.0),
        ('{"n": 1} and more', 0.0, 0.0),
        ("", 0.0, 0.0),
        ('{"s": "数学🙂", "n": 2}', 1.0, 1.0),
        ("[" * 100_000, 0.0, 0.0),
        ('<think>{"n": 2}</think>{"n": 1}', 1.0, 1.0),
        ('so # of keys is 1</think>{"n": 1}', 1.0, 1.0),
        ('the "n" key, 5" long</think>{"n": 1}', 1.0, 1.0),
        ('I use """ here\nok.</think>{"n": 1}', 1.0, 1.0),
        ('# {"n": 1}</think>', 0.0, 0.0),
        ('```json\n{"n": 1}\n```\n# or not</think>none', 0.0, 0.0),
        ('<think>{"n": 1}', 0.0, 0.0),
        (f'{{"{"x" * 250} </think> b": 2}}', 0.0, 1.0),
        (f' {{"{"x" * 250} <think> b": 2}}\n', 0.0, 1.0),
    ],
)
def test_only_json_that_fits_the_schema_gets_the_reward(response: str, value: float, parses: float) -> None:
    reward = score("json_schema", response, metadata={"json_schema": SCHEMA})
    assert (reward.value, reward.parts) == (value, {"parses": parses})


def test_json_that_violates_the_schema_may_get_a_partial_reward() -> None:
    assert score("json_schema", "[]", metadata={"json_schema": SCHEMA}, parses=0.25).value == 0.25


def test_an_infinite_number_is_not_a_multiple() -> None:
    reward = score("json_schema", "1e999", metadata={"json_schema": {"multipleOf": 0.5}}, parses=0.25)
    assert (reward.value, reward.parts) == (0.25, {"parses": 1.0})


def test_a_schema_may_be_text_or_a_file_or_missing(tmp_path: Path) -> None:
    assert score("json_schema", "{}", metadata={"json_schema": json.dumps(SCHEMA)}).value == 0.0
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
    assert score("json_schema", '{"n": 1}', path=str(tmp_path / "s.json")).value == 1.0
    assert score("json_schema", "[1]").value == 1.0


def test_a_file_without_a_schema_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        build("json_schema", path=str(tmp_path / "none.json"))
    (tmp_path / "s.json").write_text('{"type": "nothing"}')
    with pytest.raises(ConfigError, match="'nothing' is not valid"):
        build("json_schema", path=str(tmp_path / "s.json"))


@pytest.mark.parametrize("schema", [{"type": 3}, "{broken", [], 5])
def test_the_error_names_a_sample_with_an_invalid_schema(schema: object) -> None:
    with pytest.raises(ValueError, match="sample 7: metadata 'json_schema' is not a JSON schema"):
        score("json_schema", "{}", metadata={"json_schema": schema})


def test_other_documents_are_never_fetched() -> None:
    with pytest.raises(ValueError, match="the schema refers to"):
        score("json_schema", "{}", metadata={"json_schema": {"$ref": "http://127.0.0.1:9/schema.json"}})
