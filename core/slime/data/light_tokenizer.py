"""A tokenizer for counting and for worker processes, without transformers, whose import takes seconds and torch.

It is made of the `tokenizers` library's part of a transformers tokenizer, which does the same work there, and of the
chat template, rendered with what transformers offers to templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any


class LightTokenizer:
    """What `slime.data.tokenize` asks of a tokenizer."""

    def __init__(self, tokenizer: Any, chat_template: str | None, special: Mapping[str, Any]) -> None:
        """`tokenizer` of the `tokenizers` library; `special`: special tokens by the names that templates know.

        Raises `jinja2.TemplateSyntaxError` for a template with transformers' own tags.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        self._special = dict(special)
        self._compiled = None if chat_template is None else _compile(chat_template)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    @property
    def backend_tokenizer(self) -> Any:
        """By which transformers' tokenizers call the same thing."""
        return self._tokenizer

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The chat as text.  `tokenize` must be False."""
        assert not tokenize and self._compiled is not None
        text: str = self._compiled.render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=None,
            **(self._special | variables),
        )
        return text


def _compile(template: str) -> Any:
    """The template with what transformers offers to templates."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Templates may give these by their place.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)
