"""Chats of other tools' data sets are converted where that is exact, and refused with file and line otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.prompt_files import write_rows

from slime.errors import DataError
from slime.kit.chat.template import ChatTemplate
from slime.kit.readers import PromptFile, PromptRow, tokenize_prompt
from slime.kit.readers.tokenize import PromptFormat, prompt_text
from slime.testing.samples import make_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def read(folder: Path, prompt: Any, kind: str = "jsonl") -> PromptRow:
    [row] = PromptFile(write_rows(folder, kind, [{"prompt": prompt}]), input_key="prompt", label_key=None)
    return row


def text(prompt: list[dict[str, Any]], template: str = CHATML) -> str:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return prompt_text(tokenizer, prompt, None, PromptFormat(apply_chat_template=True))


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([user([{"type": "text", "text": "1+1"}, {"type": "text", "text": "="}])], [user("1+1=")]),
        ([user([{"type": "input_text", "text": "a"}])], [user("a")]),
        ([{"from": "human", "value": "a"}], [user("a")]),
        (
            [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "a"},
                {"from": "gpt", "value": "b"},
                {"from": "user", "value": "c"},
            ],
            [{"role": "system", "content": "s"}, user("a"), {"role": "assistant", "content": "b"}, user("c")],
        ),
        (
            [{"role": "Human", "content": "a"}, {"role": "bot", "content": "b"}, user("c")],
            [user("a"), {"role": "assistant", "content": "b"}, user("c")],
        ),
        ([{"role": "USER", "content": "a"}], [user("a")]),
        ([{"role": "critic", "content": "a"}], [{"role": "critic", "content": "a"}]),
        ([user(""), user("a")], [user(""), user("a")]),
    ],
)
def test_a_chat_of_another_tool_is_converted(tmp_path: Path, kind: str, given: Any, expected: Any) -> None:
    assert read(tmp_path, given, kind).prompt == expected


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_the_content_of_a_call_may_be_null(tmp_path: Path, kind: str) -> None:
    chat = [user("a"), CALL, {"role": "tool", "content": "2"}]
    [row] = PromptFile(write_rows(tmp_path, kind, [{"prompt": chat}]), input_key="prompt", label_key=None)
    assert isinstance(row.prompt, list)
    assert [message["content"] for message in row.prompt] == ["a", None, "2"]
    assert "None" not in text(row.prompt)
    [without] = PromptFile(
        write_rows(tmp_path, "jsonl", [{"prompt": [user("a"), {**CALL, "content": "None"}, user("b")]}]),
        input_key="prompt",
        label_key=None,
    )
    assert isinstance(without.prompt, list) and "None" in text(without.prompt)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "[q][][2]"),
        ("{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}", "[q][][2]"),
        ("{% for m in messages %}{{ m.content is none and 'call' or m.content }};{% endfor %}", "q;call;2;"),
        (
            "{% for m in messages %}{% if m.content == '' %}{{ raise_exception('empty') }}{% endif %}"
            "{{ m.content or 'None' }};{% endfor %}",
            "q;None;2;",
        ),
    ],
)
def test_a_null_content_is_what_the_template_can_use(template: str, expected: str) -> None:
    chat = [user("q"), CALL, {"role": "tool", "content": "2"}]
    assert text(chat, template) == expected
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    assert tokenizer.decode(ChatTemplate(tokenizer).prompt(chat)) == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([user(None)], r"the content of 'prompt'\[0\] is null, expected text"),
        ([user(5)], r"the content of 'prompt'\[0\] is a number, expected text"),
        ([user({"a": 1})], r"the content of 'prompt'\[0\] is an object, expected text"),
        ([user([])], r"the content of 'prompt'\[0\] is an empty list"),
        ([user(["a"])], r"part 0 of the content of 'prompt'\[0\] is a string, expected \{\"type\": \"text\""),
        (
            [user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "b"}}])],
            r"part 1 of the content of 'prompt'\[0\] is of type 'image_url'.*prompts are text alone",
        ),
        ([user([{"type": "text"}])], "is without text"),
        ([user("a"), {"role": "assistant", "content": None}, user("b")], r"the content of 'prompt'\[1\] is null"),
        ([user("a"), {"role": "assistant"}, user("b")], r"'prompt'\[1\] has the keys \['role'\], expected 'role'"),
        ([{"user": "a"}], r"'prompt'\[0\] has the keys \['user'\], expected 'role' \(a string\) and 'content'"),
        ([{"from": 1, "value": "a"}], r"'prompt'\[0\] has the keys \['from', 'value'\], expected 'role'"),
        (
            [user("a"), {"role": "assistant", "content": "b"}],
            r"'prompt' ends with an answer .*row\[\"label\"\] = row\[\"prompt\"\]\.pop\(\)\[\"content\"\]",
        ),
        ([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "'prompt' ends with an answer"),
    ],
)
def test_a_chat_that_is_not_exact_is_refused_with_its_line(tmp_path: Path, prompt: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"p\.jsonl:1: .*{message}"):
        read(tmp_path, prompt)


CHAT = [{"content": 'say "hi"', "role": "user"}]


@pytest.mark.parametrize(
    "prompt",
    [
        json.dumps(CHAT),
        "\n \t" + json.dumps(CHAT, indent=2) + "\n",
        json.dumps(CHAT, separators=(",", ":")),
        json.dumps([{"from": "human", "value": "a"}]),
        json.dumps({"messages": CHAT}),
        json.dumps(CHAT[0]),
        json.dumps([{"from": "GPT", "value": None}, {"role": "user", "content": [{"type": "text", "text": "a"}]}]),
        str(CHAT),
        str([{"role": "user", "content": "it's"}]),
        "[{'role': 'user', 'content': 'a'}\n {'role': 'assistant', 'content': 'b'}]",
    ],
)
def test_a_chat_as_text_is_refused(tmp_path: Path, prompt: str) -> None:
    with pytest.raises(DataError, match=r"p\.jsonl:1: 'prompt' is a chat as JSON text, expected the list itself"):
        read(tmp_path, prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        json.dumps(CHAT) + "\nWhat does the user say?",
        '[{"role": "user"}]',
        "{'role': 'admin'} is what type in Python? {}",
        '{"a": 1}',
        "[]",
        "[x]",
        "{}",
        '{"from": "km", "to": "miles", "value": 5}',
        "{'from': 'km', 'to': 'miles', 'value': 5}",
        '[{"from": "A", "to": "B", "value": 3}]',
        "[{'from': 'A', 'to': 'B', 'value': '3'}]",
        '{"role": "admin", "content": "x"}',
        '{"role": "user", "content": 5}',
        "{'role': 'user', 'content': 5}",
    ],
)
def test_a_question_about_data_is_text(tmp_path: Path, prompt: str) -> None:
    assert read(tmp_path, prompt).prompt == prompt


# --- what a template makes of a chat -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (
            "{% for m in messages %}{{ 'A:' if m.role == 'assistant' else 'Q:' }}{{ m.content }}{% endfor %}>",
            [user("q"), {"role": "critic", "content": "a"}],
            "message 1 has the role 'critic', which the chat template does not name or print",
        ),
        (
            "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}>",
            [{"role": "system", "content": "s"}, user("q")],
            r"the chat template drops the content of message 1 \(role 'user'\)",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}>",
            [{"role": "developer", "content": "be brief"}, user("q")],
            r"drops the content of message 0 \(role 'developer'\)",
        ),
        ("{{ messages[0].text }}>", [user("q")], "drops the content of message 0"),
    ],
)
def test_a_prompt_that_loses_a_message_is_refused(template: str, chat: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        text(chat, template)


@pytest.mark.parametrize(
    ("template", "chat", "expected"),
    [
        ("{% if messages[0].role == 'critic' %}C{{ messages[0].content }}{% endif %}", "critic", "Cq /think"),
        (CHATML, "environment", "<|im_start|>environment\nq /think<|im_end|>\n<|im_start|>assistant"),
        ("{{ messages[0].role | upper }}: {{ messages[0].content }}", "critic", "CRITIC: q /think"),
        ("{{ messages[0].content.replace('/think', '') }}>", "user", "q >"),
        ("{{ messages[0].content | tojson }}>", "tool", '"q /think">'),
        ("{{ messages[0].content | trim | upper }}{{ messages[0].content }}", "user", "Q /THINKq /think"),
    ],
)
def test_a_template_may_change_what_it_prints(template: str, chat: str, expected: str) -> None:
    assert text([{"role": chat, "content": "q /think"}], template) == expected


def test_a_question_alone_has_no_role_to_lose() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0].role }}"
    with pytest.raises(DataError, match="drops the content of message 0"):
        tokenize_prompt(tokenizer, "q", apply_chat_template=True)
