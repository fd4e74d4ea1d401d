"""A tokenizer for worker processes and quick checks. It needs no transformers, whose import takes seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from slime.errors import DataError
from slime.kit.readers.tokenize import PromptFormat, backend_of, prompt_text


class LightTokenizer:
    """The part of a transformers tokenizer that `slime.kit.readers.tokenize` and `slime.kit.chat` use.

    It wraps the `tokenizers` object inside a transformers tokenizer, so tokens are the same, and renders the chat
    template with the functions that transformers offers to templates.
    """

    def __init__(
        self, tokenizer: Any, chat_template: str | None, special: Mapping[str, Any], name_or_path: str = ""
    ) -> None:
        """Initialize.

        Args:
            tokenizer: A tokenizer of the `tokenizers` library.
            chat_template: Jinja source; None if the model has no template.
            special: Special tokens by the names that templates use.
            name_or_path: The model folder, under the name it has in transformers.

        Raises:
            jinja2.TemplateSyntaxError: The template uses tags that only transformers defines.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        self.name_or_path = name_or_path
        self._special = dict(special)
        self._compiled = None if chat_template is None else template_environment().from_string(chat_template)

    def __reduce__(self) -> tuple[Any, ...]:
        return LightTokenizer, (self._tokenizer, self.chat_template, self._special, self.name_or_path)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    @property
    def backend_tokenizer(self) -> Any:
        """The wrapped tokenizer, under the name it has in transformers."""
        return self._tokenizer

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """The entry of the vocabulary with an id; None if there is none."""
        entry: str | None = self._tokenizer.id_to_token(token)
        return entry

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token."""
        eos = self._special.get("eos_token")
        number: int | None = None if eos is None else self._tokenizer.token_to_id(eos)
        return number

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Tokens that are cut out of texts before these are tokenized."""
        added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        return added

    @property
    def all_special_tokens(self) -> list[str]:
        """The control tokens that have a name."""
        return [str(token) for token in self._special.values()]

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tokenize: bool, tools: Any = None, **variables: Any
    ) -> str:
        """Render a chat as text. `tokenize` must be False."""
        assert not tokenize and self._compiled is not None
        text: str = self._compiled.render(messages=messages, tools=tools, documents=None, **(self._special | variables))
        return text


def template_environment() -> Any:
    """Jinja with the filters and functions that transformers offers to templates."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Templates may pass these by position.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


_TEXTS = ("Hello, world! 1+2=", " é\n\t<|end|> <s>x</s>", "名前 🙂")
_CHAT = [{"role": "user", "content": " 1+1=?\n"}]


def lightest(tokenizer: Any, form: PromptFormat) -> Any:
    """A `LightTokenizer` if it agrees with `tokenizer` on a few texts, else `tokenizer` itself."""
    import jinja2

    backend = backend_of(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    if not hasattr(backend, "to_str") or not (template is None or isinstance(template, str)):
        return tokenizer
    special = {name: str(token) for name, token in getattr(tokenizer, "special_tokens_map", {}).items() if token}
    try:
        light = LightTokenizer(
            type(backend).from_str(backend.to_str()), template, special, getattr(tokenizer, "name_or_path", "")
        )
    except jinja2.TemplateSyntaxError:
        return tokenizer  # the template uses tags that only transformers defines
    for text in _TEXTS:
        if light.encode(text, add_special_tokens=False) != tokenizer.encode(text, add_special_tokens=False):
            return tokenizer
    if form.apply_chat_template and template and _rendered(light, form) != _rendered(tokenizer, form):
        return tokenizer
    return light


def _rendered(tokenizer: Any, form: PromptFormat) -> str:
    try:
        return prompt_text(tokenizer, _CHAT, None, form)
    except DataError as error:
        return str(error)
