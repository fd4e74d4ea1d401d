"""Arguments of earlier calls are shown once, whatever form they have and the template takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.tokenizer_features import FAMILIES, make_tokenizer

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
