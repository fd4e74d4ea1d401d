"""Conversations have the tokens of their whole text, whatever tokenizer and template a family has."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.support.tokenizer_features import FAMILIES, SPACES, make_tokenizer

from slime.kit.chat import ChatTemplate, Codec

SCRIPTS = Path(__file__).parents[3] / "scripts" / "models"
ASKED = {"role": "user", "content": "look up the answer"}
ANSWER = "search 42"
CALL = {"id": "call00000", "type": "function", "function": {"name": "search", "arguments": {}}}
RESULT = {"role": "tool", "content": "the result is 100", "name": "search", "tool_call_id": "call00000"}
PARTS = [(family, space) for family in FAMILIES for space in SPACES]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Makes the tokenizer of a family, once."""

    @cache
    def make(family: str, space: str | None = None) -> Any:
        return make_tokenizer(FAMILIES[family], tmp_path_factory.mktemp(family), space=space)

    return make


def text_of(tokenizer: Any, *messages: dict[str, Any], generation: bool = True) -> str:
    text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation)
    return text


def ids(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def test_the_table_has_every_family_of_the_scripts() -> None:
    named = sorted(script for features in FAMILIES.values() for script in features["scripts"])
    assert named == sorted(path.stem for path in SCRIPTS.glob("*.sh"))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "space"), PARTS)
@pytest.mark.parametrize("message", [RESULT, {"role": "user", "content": "go on"}])
def test_a_conversation_has_the_tokens_of_its_whole_text(
    family: str, space: str, message: dict[str, str], made: Callable[..., Any]
) -> None:
    features = FAMILIES[family]
    tokenizer = made(family, space)
    calls = message is RESULT and features["tools"] == "call"
    answered = {"role": "assistant", "content": ANSWER, **({"tool_calls": [CALL]} if calls else {})}
    text = text_of(tokenizer, ASKED, answered, message)
    prompt = text_of(tokenizer, ASKED)
    behind = text.removeprefix(prompt + ANSWER)
    if calls:  # the call is text that the template writes, and the policy has written it otherwise
        behind = behind[behind.index(features["eos"]) :]
        text = prompt + ANSWER + behind
    end = features.get("mark", features["eos"])
    if features["turn"] == "next role":
        end = "<|observation|>" if message is RESULT else "<|user|>"
    if features["turn"] == "text":  # the policy writes an end that the template does not
        behind = end + behind
        text = prompt + ANSWER + behind
    assert behind.startswith(end)
    whole, ended = ids(tokenizer, text), ids(tokenizer, prompt + ANSWER + end)
    assert whole[: len(ended)] == ended
    answer = ended[len(ids(tokenizer, prompt)) :]
    template = ChatTemplate(tokenizer)
    assert template.continuation([message], answer) == whole[len(ended) :]
    # A stop string has ended the answer: its turn is ended by the template.
    unended = template.continuation([message], answer[:-1])
    if features["turn"] == "text":
        assert tokenizer.decode(unended) == behind.removeprefix(end)
    else:
        assert unended == whole[len(ended) - 1 :]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_ends_otherwise_is_not_ended_twice(family: str, made: Callable[..., Any]) -> None:
    features = FAMILIES[family]
    tokenizer = made(family)
    template = ChatTemplate(tokenizer)
    usual = {"token": features.get("mark"), "eos": features["eos"], "next role": None, "text": None}[features["turn"]]
    for other in (text for text in features["ends"] if text != usual):
        end = tokenizer.convert_tokens_to_ids(other)
        new = tokenizer.decode(template.continuation([RESULT], [*ids(tokenizer, ANSWER), end]))
        assert not new.startswith(other)
        assert usual is None or new.count(usual) == (features["turn"] == "token") + (features["turn"] == "eos")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "space"), PARTS)
def test_no_end_token_stays_in_the_text_of_an_answer(family: str, space: str, made: Callable[..., Any]) -> None:
    features = FAMILIES[family]
    tokenizer = made(family, space)
    codec, template = Codec(tokenizer), ChatTemplate(tokenizer)
    assert codec.ends == set(map(tokenizer.convert_tokens_to_ids, features["ends"]))
    for end in codec.ends:
        answer = [*ids(tokenizer, ANSWER), end]
        assert codec.answer(answer).strip() == ANSWER
        assert template.text(answer).strip() == ANSWER
        assert template.plain_text(answer, template.text(answer)).strip() == ANSWER


@pytest.mark.slow
@pytest.mark.parametrize(("family", "space"), PARTS)
@pytest.mark.parametrize("label", ["42", "the answer is 42", " 42", "\n42"])
def test_a_text_after_a_prompt_has_the_tokens_of_the_whole(
    family: str, space: str, label: str, made: Callable[..., Any]
) -> None:
    tokenizer = made(family, space)
    codec = Codec(tokenizer)
    compared = 0
    for prompt in ("<|im_start|>assistant", "<|assistant|>", "the answer is:"):
        before = ids(tokenizer, prompt)
        whole = ids(tokenizer, prompt + label)
        if whole[: len(before)] == before:  # otherwise the text is merged with the end of the prompt
            compared += 1
            assert codec.encode_after(label, before[-1]) == whole[len(before) :]
    assert compared


@pytest.mark.parametrize("space", SPACES)
def test_text_with_a_control_token_inside_gains_no_space(space: str, made: Callable[..., Any]) -> None:
    tokenizer = made("qwen3", space)
    template = ChatTemplate(tokenizer)
    for text in ("a<|im_end|>b", "<|endoftext|>", "x <|im_start|> y"):
        new = template.continuation([{"role": "tool", "content": text}], ids(tokenizer, "42"))
        assert f"<tool_response>{text}</tool_response>" in tokenizer.decode(new)
        prompt = template.prompt([{"role": "user", "content": text}], trusted=False)
        assert f"user\n{text}<|im_end|>" in tokenizer.decode(prompt)
