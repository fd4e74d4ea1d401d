"""Text to tokens and back, one text at a time: pieces of a conversation, and the answers of the policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from slime.kit.readers.tokenize import backend_of, batch_backend

#: stands before a text that continues another; a private-use character, which no tokenizer merges with its neighbours
_BEFORE = "\ue000"
#: files of a model folder that name its end tokens
_END_FILES = ("generation_config.json", "config.json")
#: end tokens that some models name nowhere; SGLang ends answers at them too
_UNNAMED_ENDS = ("<|eom_id|>",)


class Codec:
    """Encodes and decodes one text at a time, as a tokenizer does.

    What transformers does around the backend of a tokenizer takes several times as long as the backend itself if a text
    is short. So the backend is used, unless it may give something else.

    Attributes:
        decode: The text of a list of token ids; takes `skip_special_tokens`. The library's own function.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encoder = batch_backend(tokenizer)
        plain = getattr(tokenizer, "is_fast", False) and not tokenizer.clean_up_tokenization_spaces
        backend = backend_of(tokenizer) if plain else None
        self.decode: Callable[..., str] = (tokenizer if backend is None else backend).decode

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it; those in it become control tokens."""
        if self._encoder is None:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def encode_after(self, text: str, before: int | None = None) -> list[int]:
        """Token ids of a text that continues another.

        Many tokenizers put a space before a text that is encoded alone, and some control tokens swallow the white space
        that follows them. Both depend on what stands before the text.

        Args:
            text: The text.
            before: The token before it; None, or any token but a control token: plain text.
        """
        if before in self.special:
            start = str(self._tokenizer.convert_ids_to_tokens(before))
            whole = self.encode(start + text)
            if whole[:1] == [before]:
                return whole[1:]
        return self.encode(_BEFORE + text)[len(self._before) :] if self._begins else self.encode(text)

    @cached_property
    def _before(self) -> list[int]:
        return self.encode(_BEFORE)

    @cached_property
    def _begins(self) -> bool:
        """Whether a text gets other tokens at the beginning than after another text."""
        return self.encode(f"{_BEFORE}a") != self._before + self.encode("a")

    def answer(self, tokens: Sequence[int]) -> str:
        """The text of an answer for people and rewards: without end tokens, and without other special tokens."""
        return self.decode(without_ends(tokens, self.ends), skip_special_tokens=True)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens at which engines end an answer; see `end_tokens`."""
        folder = getattr(self._tokenizer, "name_or_path", None)
        return frozenset(end_tokens(self._tokenizer, Path(folder) if folder else None))

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of control tokens, including those that the tokenizer has no name for."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        named = getattr(self._tokenizer, "all_special_ids", ())
        return frozenset(named) | {one for one, token in added.items() if token.special}


def without_ends(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """An answer without the tokens that end it."""
    kept = len(tokens)
    while kept and tokens[kept - 1] in ends:
        kept -= 1
    return list(tokens[:kept])


def end_tokens(tokenizer: Any, folder: Path | None) -> dict[int, str]:
    """The tokens at which engines end an answer, each with where it is named.

    They are the tokenizer's end-of-sequence token, and as in SGLang all of `eos_token_id` in the model folder.
    """
    found: dict[int, str] = {}
    if (eos := getattr(tokenizer, "eos_token_id", None)) is not None:
        found[eos] = "the tokenizer"
    for file in () if folder is None else (folder / name for name in _END_FILES):
        for token in _stated_ends(file):
            found.setdefault(token, file.name)
    known = getattr(tokenizer, "added_tokens_decoder", {})
    for token, text in known.items():
        if str(text) in _UNNAMED_ENDS:
            found.setdefault(token, "SGLang")
    return found


def _stated_ends(file: Path) -> list[int]:
    """`eos_token_id` of a file of a model folder, as a list; empty if the file does not state any."""
    try:
        stated = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return []
    ids = stated.get("eos_token_id") if isinstance(stated, dict) else None
    return [one for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)]
