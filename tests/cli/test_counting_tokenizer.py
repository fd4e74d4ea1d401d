"""Counting tokens without transformers gives the same result as with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny_models import write_tiny_tokenizer

from slime.cli.preflight_tokens import load_tokenizer
from slime.errors import ConfigError
from slime.kit.readers import tokenize_prompt
from slime.kit.readers.light_tokenizer import LightTokenizer

CHAT = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "1+1=?\n"}]

#: what real templates use: whitespace control, special tokens, tojson, loop controls, namespaces, refusals
TEMPLATE = """\
{{ bos_token }}{% set state = namespace(seen=false) %}
{%- for message in messages %}
    {%- if message.role == 'nobody' %}{% continue %}{% endif %}
    {%- if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}
    {%- set state.seen = true %}
<{{ message.role }}>{{ message.content | trim | tojson }}{{ eos_token }}
{% endfor %}
{% if tools %}tools{% endif %}
{% if add_generation_prompt and state.seen %}<assistant>
{% endif %}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path)
    return tmp_path


def both(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    ours = load_tokenizer(folder, with_template=True)
    assert isinstance(ours, LightTokenizer)
    return ours, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("prompt", ["1+1=", " spaces  and\ttabs\n", CHAT])
def test_prompts_have_the_same_tokens(folder: Path, prompt: Any) -> None:
    ours, theirs = both(folder)
    template = not isinstance(prompt, str)
    assert tokenize_prompt(ours, prompt, apply_chat_template=template) == tokenize_prompt(
        theirs, prompt, apply_chat_template=template
    )


@pytest.mark.parametrize("where", ["file", "string", "list"])
def test_templates_are_found_and_rendered_in_the_same_way(folder: Path, where: str) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"bos_token": "<unk>"}
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config.pop("chat_template", None)
    if where == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    else:
        config["chat_template"] = TEMPLATE if where == "string" else [{"name": "default", "template": TEMPLATE}]
    path.write_text(json.dumps(config))
    ours, theirs = both(folder)
    expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == expected
    assert "<assistant>" in expected


def test_a_template_may_refuse(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(folder, with_template=True)
    with pytest.raises(Exception, match="no robots"):
        tokenizer.apply_chat_template([{"role": "robot"}], tokenize=False, add_generation_prompt=True)


def test_a_template_with_tags_of_transformers_uses_transformers(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% generation %}x{% endgeneration %}")
    tokenizer = load_tokenizer(folder, with_template=True)
    assert not isinstance(tokenizer, LightTokenizer)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == "x"


def test_a_tokenizer_without_template_has_none(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert load_tokenizer(folder, with_template=True).chat_template is None


def test_a_broken_tokenizer_is_refused_with_the_folder(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(folder, with_template=False)
