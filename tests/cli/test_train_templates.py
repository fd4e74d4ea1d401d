"""Chat templates with mistakes: refused before anything starts, with the file and the line of the template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Slime, change_config
from tests.support.tokenizer_features import FAMILIES, template_of

from slime.cli.preflight_prompts import _unknown_names

LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"


def with_template(model: Path, template: str, where: str = "chat_template.jinja") -> list[str]:
    """The words for a model folder whose tokenizer has a template, in a file of its own or in its configuration."""
    change_config(model, max_position_embeddings=512)
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    if where == path.name:
        config["chat_template"] = template
    else:
        (model / where).write_text(template)
    path.write_text(json.dumps(config))
    return ["--hf-checkpoint", str(model), "--apply-chat-template"]


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("template", "line", "said"),
    [
        ("a\n{% for m in messages %}\n{{ m.content }", 3, "TemplateSyntaxError: unexpected '}'"),
        ("{% for m in messages %}\n{{ m.content }}\n", 2, "Unexpected end of template"),
        ("\n{% foo %}", 2, "Encountered unknown tag 'foo'"),
        ("\n\n{{ messages|trimm }}", 3, "No filter named 'trimm'"),
        ("{% generation %}{% endgeneration %}\n{{ messages|trimm }}", 2, "No filter named 'trimm'"),
    ],
)
def test_what_is_no_template_is_refused_once_and_not_row_by_row(
    refused: Callable[..., str], model: Path, template: str, line: int, said: str, where: str
) -> None:
    message = refused(*with_template(model, template, where), "--bad-rows", "skip")
    assert message.startswith("the chat template cannot be read: ") and said in message
    own = f"{model / where}:{line}: " in message
    assert own or f"line {line} of chat_template in {model / where}: " in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "line", "said"),
    [
        (LOOP + "\n{{ shout(messages) }}", 2, "UndefinedError: 'shout' is undefined"),
        (LOOP + "\n{{ messages[0].foo.bar }}", 2, "has no attribute 'foo'"),
        (LOOP + "\n\n{{ raise_exception('only for tools') }}", 3, "TemplateError: only for tools"),
        (LOOP + "\n{% if messages is strin %}{% endif %}", 2, "No test named 'strin'"),
        (LOOP + "{{ 1 / 0 }}", 1, "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}\n{{ f() }}", 1, "RecursionError"),
        ("{% include 'other.jinja' %}" + LOOP, 1, "no loader for this environment"),
    ],
)
def test_a_template_that_fails_is_refused_with_the_row_and_its_line(
    refused: Callable[..., str], prompts: Path, model: Path, template: str, line: int, said: str
) -> None:
    words = with_template(model, template)
    message = refused(*words)
    assert f"{prompts}:1: the chat template refuses the prompt: {model}/chat_template.jinja:{line}: " in message
    assert said in message
    assert said in refused(*words, "--bad-rows", "skip"), "where all rows are bad, the first reason is named"


def test_what_a_rare_branch_of_a_template_lacks_is_noted(slime: Slime, base_words: list[str], model: Path) -> None:
    branch = "\n{% if messages[0].role == 'tool' %}{{ messages|foo }}{{ bar() }}{{ messages is strin }}{% endif %}"
    ended = slime("train", *base_words, *with_template(model, LOOP + branch), "--dry-run")
    assert ended.code == 0, ended.err
    for what in ("filter 'foo'", "function 'bar'", "test 'strin'"):
        assert f"uses the {what} in its line 2, which does not exist: prompts that reach it are refused" in ended.out


@pytest.mark.parametrize(
    "template",
    [
        *(template_of(family) for family in FAMILIES.values()),
        "{% if strftime is defined %}{{ strftime(1) }}{% endif %}{{ strftime_now('%Y') }}{{ raise_exception('x') }}",
        "{% macro q(x) %}{{ x|tojson }}{% endmacro %}{{ q(range(2)) }}{% set n = namespace(a=1) %}{{ given(1) }}",
        "{% if foo %}{{ foo('x') }}{% endif %}{{ bar() if bar else '' }}",
        "{% if true %}{% macro q() %}{% endmacro %}{% endif %}{{ q() }}",
    ],
)
def test_nothing_is_said_of_what_templates_have(template: str) -> None:
    assert list(_unknown_names(template, ["given"])) == []
