"""A tokenizer on its way into a worker process."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.data.light_tokenizer import LightTokenizer
from slime.data.tokenize import PromptFormat, prompt_text
from slime.errors import DataError

_TEXTS = ("Hello, world! 1+2=", " é\n\t<|end|> <s>x</s>", "名前 🙂")
_CHAT = [{"role": "user", "content": " 1+1=?\n"}]


@dataclass(frozen=True)
class TokenizerRecipe:
    """Either what a `LightTokenizer` is made of, or the tokenizer itself, pickled."""

    pickled: bytes = b""
    definition: str = ""
    chat_template: str | None = None
    special: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        """The tokenizer."""
        if self.pickled:
            return pickle.loads(self.pickled)
        from tokenizers import Tokenizer

        return LightTokenizer(Tokenizer.from_str(self.definition), self.chat_template, self.special)


def recipe_of(tokenizer: Any, form: PromptFormat) -> TokenizerRecipe:
    """The light one where it gives what `tokenizer` gives, tried on a few texts: importing transformers takes seconds.

    Raises `DataError` for a tokenizer that cannot be handed to another process.
    """
    light = _light(tokenizer)
    if light is not None and _same(light.make(), tokenizer, form):
        return light
    try:
        return TokenizerRecipe(pickled=pickle.dumps(tokenizer))
    except Exception as error:  # the boundary around a tokenizer's own pickling
        raise DataError(
            f"the tokenizer cannot be handed to data workers: {type(error).__name__}: {error}. Use --num-data-workers 0"
        ) from error


def _light(tokenizer: Any) -> TokenizerRecipe | None:
    import jinja2

    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    template = getattr(tokenizer, "chat_template", None)
    if not hasattr(backend, "to_str") or not (template is None or isinstance(template, str)):
        return None
    special = {name: str(token) for name, token in getattr(tokenizer, "special_tokens_map", {}).items() if token}
    recipe = TokenizerRecipe(definition=backend.to_str(), chat_template=template, special=special)
    try:
        recipe.make()
    except jinja2.TemplateSyntaxError:
        return None  # a template with transformers' own tags
    return recipe


def _same(one: Any, other: Any, form: PromptFormat) -> bool:
    for text in _TEXTS:
        if one.encode(text, add_special_tokens=False) != other.encode(text, add_special_tokens=False):
            return False
    if not form.apply_chat_template or not other.chat_template:
        return True
    return _rendered(one, form) == _rendered(other, form)


def _rendered(tokenizer: Any, form: PromptFormat) -> str:
    try:
        return prompt_text(tokenizer, _CHAT, None, form)
    except DataError as error:
        return str(error)
