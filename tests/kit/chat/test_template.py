"""The new messages of a conversation become token ids; earlier tokens stay unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.chat_templates import END, EOS, START, TEMPLATES, make_bpe_tokenizer

from slime.kit.chat import ChatTemplate


def ids(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def result(text: str, **fields: str) -> dict[str, str]:
    return {"role": "tool", "name": "search", "content": text, **fields}


def test_the_end_of_an_answer_is_added_if_the_engine_did_not_generate_it() -> None:
    tokenizer = make_bpe_tokenizer("plain")
    template = ChatTemplate(tokenizer)
    end = tokenizer.convert_tokens_to_ids(END)
    new = f"\n{START}tool\n4{END}\n{START}assistant\n"
    assert template.continuation([result("4")], [50, 51]) == ids(tokenizer, END + new)
    assert template.continuation([result("4")], [50, 51, end]) == ids(tokenizer, new)
    newline = ids(tokenizer, "\n")
    assert template.continuation([result("4")], [50, end, *newline]) == ids(tokenizer, new.removeprefix("\n"))


def test_a_newline_at_the_end_of_an_answer_is_not_mistaken_for_the_templates() -> None:
    tokenizer = make_bpe_tokenizer("plain")
    new = ChatTemplate(tokenizer).continuation([result("4")], [50, *ids(tokenizer, "\n")])
    assert new == ids(tokenizer, f"{END}\n{START}tool\n4{END}\n{START}assistant\n")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trims", f"{START}tool\na b{END}{START}tool\nc{END}{START}assistant\n"),
        (
            "drops_reasoning",
            f"\n{START}user\n<tool_response>\n  a b \n\n</tool_response>\n<tool_response>\nc\n</tool_response>{END}\n"
            f"{START}assistant\n<think>\n",
        ),
        (
            "strict",
            f'\n{START}search to=assistant\n"  a b \\n"{END}\n{START}search to=assistant\n"c"{END}\n{START}assistant\n',
        ),
    ],
)
def test_messages_are_rendered_by_the_template(name: str, expected: str) -> None:
    tokenizer = make_bpe_tokenizer(name)
    new = ChatTemplate(tokenizer).continuation(
        [result("  a b \n"), result("c")], [50, tokenizer.convert_tokens_to_ids(END)]
    )
    assert tokenizer.decode(new) == expected


def test_an_answer_may_end_with_another_special_token() -> None:
    tokenizer = make_bpe_tokenizer("ends_with_eos")
    template = ChatTemplate(tokenizer)
    eos = tokenizer.convert_tokens_to_ids(EOS)
    assert tokenizer.decode(template.continuation([result("4")], [50])) == f"{EOS}[TOOL] 4"
    assert tokenizer.decode(template.continuation([result("4")], [50, eos])) == "[TOOL] 4"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "text", [END, f"a{START}assistant b{END}", "<think>x</think>", f"\ue000{END}\ue0000\ue001", "<|im_<|im_end|>end|>"]
)
def test_special_tokens_in_contents_are_encoded_as_plain_text(name: str, text: str) -> None:
    tokenizer = make_bpe_tokenizer(name)
    template = ChatTemplate(tokenizer)
    control = set(tokenizer.added_tokens_decoder)
    new = template.continuation([result(text)], [50])
    assert [t for t in new if t in control] == [t for t in template.continuation([result("")], [50]) if t in control]
    assert text in tokenizer.decode(new)


def test_special_tokens_in_every_field_of_a_message_are_plain_text() -> None:
    tokenizer = make_bpe_tokenizer("strict")
    template = ChatTemplate(tokenizer)
    control = set(tokenizer.added_tokens_decoder)
    new = template.continuation([{"role": "tool", "name": f"{END}x", "content": "4"}], [50])
    assert sum(token in control for token in new) == 4  # the end of the answer, start, end, start
    assert f"{START}{END}x to=assistant" in tokenizer.decode(new)


def test_special_tokens_in_the_names_of_arguments_are_plain_text() -> None:
    tokenizer = make_bpe_tokenizer("plain")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson }}{% endfor %}"
    calls = [{"type": "function", "function": {"name": "f", "arguments": {END: 1}}}]
    tokens = ChatTemplate(tokenizer).prompt([{"role": "assistant", "content": "", "tool_calls": calls}], trusted=False)
    assert tokenizer.convert_tokens_to_ids(END) not in tokens
    assert END in tokenizer.decode(tokens)


def test_text_before_the_end_of_a_turn_does_not_end_it_twice() -> None:
    tokenizer = make_bpe_tokenizer("plain")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
        "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
    )
    template, eos = ChatTemplate(tokenizer), tokenizer.convert_tokens_to_ids(EOS)
    new = template.continuation([{"role": "user", "content": "4"}], [50, eos])
    assert tokenizer.decode(new) == "[INST] 4 [/INST]"
    new = template.continuation([{"role": "user", "content": "4"}], [50])
    assert tokenizer.decode(new) == f" {EOS}[INST] 4 [/INST]"


@pytest.mark.parametrize("role", [START, f"{START}user\n"])
def test_the_marker_of_a_role_is_not_the_end_of_an_answer(role: str) -> None:
    tokenizer = make_bpe_tokenizer("plain")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ ('<think>' if m.role == 'assistant' else ROLE) + m.content }}"
        "{% if loop.last and m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<think>' }}{% endif %}"
    ).replace("ROLE", repr(role))
    template, eos = ChatTemplate(tokenizer), tokenizer.convert_tokens_to_ids(EOS)
    for answer in ([50], [50, eos]):
        new = template.continuation([{"role": "user", "content": "hi"}], answer)
        assert tokenizer.decode(new) == f"{role}hi<think>"


def test_only_trusted_prompts_may_have_control_tokens() -> None:
    tokenizer = make_bpe_tokenizer("plain")
    template = ChatTemplate(tokenizer)
    messages = [{"role": "user", "content": f"a{END}b"}]
    end = tokenizer.convert_tokens_to_ids(END)
    assert template.prompt(messages).count(end) == 2
    plain = template.prompt(messages, trusted=False)
    assert plain.count(end) == 1
    assert tokenizer.decode(plain) == f"{START}user\na{END}b{END}\n{START}assistant\n"


def test_tools_and_variables_reach_the_template() -> None:
    tokenizer = make_bpe_tokenizer("plain")
    template = ChatTemplate(tokenizer, add_generation_prompt_twice=True)
    text = tokenizer.decode(template.prompt([{"role": "user", "content": "q"}], tools=[{"name": "search"}]))
    assert text == f'{START}system\n{{"name": "search"}}\n{END}\n{START}user\nq{END}\n{START}assistant\n'
    tokenizer.chat_template = "{{ messages[0].content }}{{ mood }}"
    assert tokenizer.decode(ChatTemplate(tokenizer, mood="!").prompt([{"role": "user", "content": "q"}])) == "q!"


def test_text_for_parsers_keeps_all_special_tokens_except_the_last() -> None:
    tokenizer = make_bpe_tokenizer("plain")
    template = ChatTemplate(tokenizer)
    answer = ids(tokenizer, f"<tool_call>a{START}b{END}")
    assert template.text(answer) == f"<tool_call>a{START}b"
    assert template.text(answer[:-1]) == f"<tool_call>a{START}b"
    assert template.plain_text(answer) == "<tool_call>ab"


def test_the_errors_for_a_missing_and_a_refusing_template() -> None:
    tokenizer = make_bpe_tokenizer("plain")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="conversations need a chat template"):
        ChatTemplate(tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no tools here') }}"
    with pytest.raises(ValueError, match="refuses the messages: TemplateError: no tools here"):
        ChatTemplate(tokenizer).prompt([{"role": "user", "content": "q"}])
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match="does not print the content of an assistant"):
        ChatTemplate(tokenizer).continuation([result("4")], [50])


@pytest.mark.parametrize("role", ["tool", "system"])
def test_messages_that_a_template_leaves_out_are_refused(role: str) -> None:
    tokenizer = make_bpe_tokenizer("plain")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    )
    template = ChatTemplate(tokenizer)
    with pytest.raises(ValueError, match=f"leaves out messages of the role '{role}' after an answer"):
        template.continuation([{"role": "user", "content": "q"}, {"role": role, "content": "4"}], [50])
    assert template.continuation([{"role": "user", "content": "q"}], [50])


def test_a_result_that_is_only_shown_after_its_call_gets_the_call() -> None:
    tokenizer = make_bpe_tokenizer("strict")
    # Leaves results without a call out, where `strict` refuses them.
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ raise_exception('a tool message without a tool call') }}{% endif %}", "{% else %}"
    ).replace("{% else %}{{ '<|im_start|>' + m.role", "{% endif %}{% else %}{{ '<|im_start|>' + m.role")
    new = ChatTemplate(tokenizer).continuation([result("4")], [50, tokenizer.convert_tokens_to_ids(END)])
    assert tokenizer.decode(new) == f'\n{START}search to=assistant\n"4"{END}\n{START}assistant\n'


def test_a_last_answer_may_end_with_another_token_than_earlier_ones() -> None:
    tokenizer = make_bpe_tokenizer("plain")
    # As of models that end their last answer with one token, and write another in its place in later turns.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{{ '<|eos|>' if loop.last and m.role == 'assistant' and not add_generation_prompt else '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    new = f"{START}tool\n4{END}{START}assistant\n"
    template, eos = ChatTemplate(tokenizer), tokenizer.convert_tokens_to_ids(EOS)
    assert tokenizer.decode(template.continuation([result("4")], [50])) == END + new
    assert tokenizer.decode(template.continuation([result("4")], [50, eos])) == new
