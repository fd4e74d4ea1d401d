"""Prompts become token ids."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.tiny_models import write_tiny_tokenizer

from slime.errors import DataError
from slime.kit.readers import PromptRow, tokenize_prompt
from slime.kit.readers.tokenize import PLAIN, prompt_ids


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def decoded(tokenizer: Any, prompt: Any, *, apply_chat_template: bool) -> str:
    ids = tokenize_prompt(tokenizer, prompt, apply_chat_template=apply_chat_template)
    assert all(isinstance(i, int) for i in ids)
    return str(tokenizer.decode(ids))


def test_text_is_tokenized_as_written(tokenizer: Any) -> None:
    assert decoded(tokenizer, "1+2=", apply_chat_template=False) == "1+2="


def test_a_chat_is_rendered_up_to_the_beginning_of_the_answer(tokenizer: Any) -> None:
    text = decoded(tokenizer, [{"role": "user", "content": "1+2="}], apply_chat_template=True)
    assert text == "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"


def test_with_a_template_text_becomes_a_user_message(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "1+2="}]
    assert decoded(tokenizer, "1+2=", apply_chat_template=True) == decoded(tokenizer, chat, apply_chat_template=True)


def test_special_tokens_of_the_template_are_single_ids(tokenizer: Any) -> None:
    ids = tokenize_prompt(tokenizer, "a", apply_chat_template=True)
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_a_chat_without_a_template_flag_is_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="needs --apply-chat-template"):
        tokenize_prompt(tokenizer, [{"role": "user", "content": "a"}], apply_chat_template=False)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(DataError, match="the tokenizer of --hf-checkpoint has none"):
        tokenize_prompt(SimpleNamespace(chat_template=None), "a", apply_chat_template=True)


def test_the_error_of_a_template_is_reported(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"the chat template refuses the prompt: .*chat_template.jinja:1: TypeError"):
        tokenize_prompt(tokenizer, [{"role": "user", "content": 5}], apply_chat_template=True)


def test_a_prompt_that_is_too_long_is_named(tokenizer: Any) -> None:
    row = PromptRow("abcdef", None, where="p.jsonl:2")
    assert len(prompt_ids(row, tokenizer, PLAIN, 6)) == 6
    with pytest.raises(DataError, match=r"p\.jsonl:2: the prompt has 6 tokens, expected at most 5"):
        prompt_ids(row, tokenizer, PLAIN, 5)


def test_a_prompt_that_cannot_be_tokenized_is_named(tokenizer: Any) -> None:
    row = PromptRow([{"role": "user", "content": "a"}], None, where="p.jsonl:9")
    with pytest.raises(DataError, match=r"p\.jsonl:9: the prompt is a list of chat messages"):
        prompt_ids(row, tokenizer, PLAIN, 5)
