"""Arguments of earlier calls are shown once, whatever form they have and the template takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.tokenizer_features import FAMILIES, make_tokenizer

from slime.errors import DataError
from slime.kit.chat import ChatTemplate
from slime.kit.readers.tokenize import tokenize_prompt


def chat(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call00000", "type": "function", "function": {"name": "search", "arguments": arguments}}
    return [
        {"role": "user", "content": "look up the answer"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "name": "search", "tool_call_id": "call00000"},
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arguments", [{"query": "where"}, '{"query": "where"}'])
def test_arguments_are_shown_as_json_once(family: str, arguments: Any, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(FAMILIES[family], tmp_path)
    for tokens in (
        tokenize_prompt(tokenizer, chat(arguments), apply_chat_template=True),
        ChatTemplate(tokenizer).prompt(chat(arguments)),
        ChatTemplate(tokenizer).prompt(chat(arguments), trusted=False),
    ):
        assert '<tool_call>search {"query": "where"}</tool_call>' in tokenizer.decode(tokens)


def test_arguments_that_are_no_object_stay_as_they_are(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(FAMILIES["qwen3"], tmp_path)
    text = tokenizer.decode(tokenize_prompt(tokenizer, chat("not JSON"), apply_chat_template=True))
    assert "<tool_call>search not JSON</tool_call>" in text


LONG = '{"n": 123456789012345678901234567890, "q": "caf\\u00e9"}'


@pytest.mark.parametrize("arguments", [LONG, '{"x": 1.10}', "not JSON", "[1, 2]"])
def test_a_template_that_takes_text_gets_it_as_it_is(arguments: str, tmp_path: Path) -> None:
    features = next(one for one in FAMILIES.values() if one["arguments"] == "both")
    tokenizer = make_tokenizer(features, tmp_path)
    own = tokenizer.apply_chat_template(chat(arguments), tokenize=False, add_generation_prompt=True)
    tokens = tokenize_prompt(tokenizer, chat(arguments), apply_chat_template=True)
    assert tokens == tokenizer.encode(own, add_special_tokens=False)


@pytest.mark.parametrize("kind", ["object", "text", "both"])
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", "{}"),
        ({}, "{}"),
        ({"n": 123456789012345678901234567890}, '{"n": 123456789012345678901234567890}'),
        ('{"n": 123456789012345678901234567890}', '{"n": 123456789012345678901234567890}'),
        ('{"a": {"b": [1, null]}}', '{"a": {"b": [1, null]}}'),
    ],
)
def test_what_is_shown(kind: str, arguments: Any, shown: str, tmp_path: Path) -> None:
    features = {**FAMILIES["qwen3"], "arguments": kind}
    tokenizer = make_tokenizer(features, tmp_path)
    text = tokenizer.decode(tokenize_prompt(tokenizer, chat(arguments), apply_chat_template=True))
    assert f"<tool_call>search {shown}</tool_call>" in text


@pytest.mark.parametrize("arguments", [None, '{"query": ', "[1]", ["where"]])
def test_arguments_that_a_template_refuses_are_named(arguments: Any, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(FAMILIES["qwen3"], tmp_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}" + (
        "{{ call.function.name }}{% for key, value in call.function.arguments.items() %}{{ key ~ value }}{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    with pytest.raises(DataError, match="The arguments of a tool call in message 1 are no JSON object"):
        tokenize_prompt(tokenizer, chat(arguments), apply_chat_template=True)
    assert tokenize_prompt(tokenizer, chat({"query": "where"}), apply_chat_template=True) == tokenizer.encode(
        "look up the answersearchquerywhere42", add_special_tokens=False
    )
