"""A tokenizer's chat template, used to render only the new messages of a conversation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any

from slime.kit.readers.tokenize import Codec

#: placeholder for an answer when only the text after it is used; private-use characters, which mean nothing to
#: templates and tokenizers
_ANSWER = "\ue000answer\ue001"


class ChatTemplate:
    """Turns messages into token ids with the tokenizer's own template.

    Untrusted message contents, such as the output of a tool, are encoded as plain text: the text of a special token in
    them gives the tokens of its characters, never the control token. One object serves a whole run.
    """

    def __init__(self, tokenizer: Any, **variables: Any) -> None:
        """Prepare a template.

        Args:
            tokenizer: A Hugging Face tokenizer.
            variables: Passed to the template, such as `enable_thinking=False`.

        Raises:
            ValueError: If the tokenizer has no chat template.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "conversations need a chat template, and the tokenizer of --hf-checkpoint has none; set chat_template"
                " in its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._codec = Codec(tokenizer)
        self._variables = variables

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        trusted: bool = True,
    ) -> list[int]:
        """Token ids [P] of the beginning of a conversation, up to the start of the answer.

        Args:
            messages: The messages before the first answer.
            tools: JSON schemas of the tools that the template shows the model.
            trusted: Whether special tokens in the messages are control tokens, as in prompts from a data set.

        Raises:
            ValueError: If the template refuses the messages.
        """
        if trusted:
            return self._codec.encode(self._render(messages, tools=tools))
        return self._encode_guarded(messages, lambda guarded: self._render(guarded, tools=tools))

    def continuation(self, messages: Sequence[Mapping[str, Any]], after: Sequence[int]) -> list[int]:
        """Token ids between an answer and the next one: the answer's end, the messages, the generation prompt.

        Earlier turns are not rendered again, so a template that would trim them or drop their reasoning cannot change
        them.

        Args:
            messages: The messages after the answer; their contents are plain text.
            after: Token ids of the answer. Parts of the answer's end that they already contain, usually the end-of-turn
                token, are not repeated.

        Raises:
            ValueError: If the template refuses the messages.
        """
        ids = self._encode_guarded(messages, self._render_after)
        end = self._end_tokens
        if after and after[-1] in self._special_ids and after[-1] in end:
            # The turn has ended, so neither this token nor what the template writes before it is repeated.
            length = end.index(after[-1]) + 1
            return ids[length:] if ids[:length] == end[:length] else ids
        for length in range(min(len(end), len(after)), 0, -1):
            if list(after[-length:]) == end[:length] and ids[:length] == end[:length]:
                return ids[length:]
        return ids

    def text(self, tokens: Sequence[int]) -> str:
        """An answer as text for parsers, with all special tokens except the one that ends it."""
        return self._codec.decode(list(tokens[: self._without_stops(tokens)]), skip_special_tokens=False)

    def plain_text(self, tokens: Sequence[int], text: str | None = None) -> str:
        """An answer as text for people and rewards, without special tokens. `text`: its `text()`, if known."""
        if text is not None and self._special_ids.isdisjoint(tokens[: self._without_stops(tokens)]):
            return text
        return self._codec.decode(list(tokens), skip_special_tokens=True)

    # --- rendering -----------------------------------------------------------------------------------

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else list(tools),
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        except Exception as error:  # the model's own template may raise anything
            raise ValueError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error
        return str(text)

    def _render_after(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text between the end of an answer's content and the next answer."""
        before: list[dict[str, Any]] = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _ANSWER}]
        try:
            return self._after_placeholder(self._render([*before, *messages]))
        except ValueError as error:
            # Some templates require the tool calls that the tool messages answer.
            calls = _calls_answered(messages)
            if not calls:
                raise
            before[1]["tool_calls"] = calls
            try:
                whole, part = self._render([*before, *messages]), self._render(before, generation_prompt=False)
            except ValueError:
                raise error from None
            return self._end + whole[len(_common(whole, part)) :]

    def _after_placeholder(self, text: str) -> str:
        _, found, after = text.partition(_ANSWER)
        if not found:
            raise ValueError("the chat template does not print the content of an assistant's message")
        return after

    @cached_property
    def _end(self) -> str:
        """The text that closes an answer."""
        before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _ANSWER}]
        end = self._after_placeholder(self._render(before, generation_prompt=False))
        # Some templates close the last message differently, so only the common beginning counts.
        try:
            user = [*before, {"role": "user", "content": "-"}]
            return _common(end, self._after_placeholder(self._render(user)))
        except ValueError:
            return end

    @cached_property
    def _end_tokens(self) -> list[int]:
        return self._codec.encode(self._end)

    def _without_stops(self, tokens: Sequence[int]) -> int:
        """The number of tokens, not counting the ones that end the answer."""
        end = len(tokens)
        while end > 0 and tokens[end - 1] in self._stops:
            end -= 1
        return end

    @property
    def control_tokens(self) -> frozenset[int]:
        """Ids of the tokens that only the template and the model write."""
        return self._special_ids

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    @cached_property
    def _stops(self) -> frozenset[int]:
        """Tokens that end an answer and are not part of its content."""
        return frozenset(self._end_tokens[:1]) & self._special_ids | {self._tokenizer.eos_token_id} - {None}

    # --- encoding ------------------------------------------------------------------------------------

    def _encode_guarded(self, messages: Sequence[Mapping[str, Any]], render: Any) -> list[int]:
        """Render and encode messages, with special tokens inside them as plain text.

        The text of such a token is cut after its first character and the pieces are encoded separately, so that none
        gives the control token. The cuts are marked before the template is applied, so that it can still trim and quote
        the contents.
        """
        special = self._special
        if special is None or not any(special.search(text) for message in messages for text in _texts(message)):
            return self._codec.encode(render(messages))
        everything = "".join(text for message in messages for text in _texts(message))
        mark = next(mark for n in count() if (mark := f"\ue000{n}\ue001") not in everything)

        def cut(text: str) -> str:
            while special.search(text):
                text = special.sub(lambda found: found[0][0] + mark + found[0][1:], text)
            return text

        pieces = render([_mapped(message, cut) for message in messages]).split(mark)
        return [token for piece in pieces if piece for token in self._codec.encode(piece)]

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        """Matches the texts of special and added tokens that have two characters or more."""
        added = {str(token) for token in getattr(self._tokenizer, "added_tokens_decoder", {}).values()}
        names = sorted((name for name in {*added, *self._tokenizer.all_special_tokens} if len(name) > 1), key=len)
        return re.compile("|".join(re.escape(name) for name in reversed(names))) if names else None


def _common(one: str, other: str) -> str:
    """The common beginning of two texts."""
    length = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _calls_answered(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tool calls answered by the tool messages, as an assistant's message contains them."""
    return [
        {
            "id": message.get("tool_call_id", f"call{number:05d}"),
            "type": "function",
            "function": {"name": message.get("name", "tool"), "arguments": {}},
        }
        for number, message in enumerate(messages)
        if message.get("role") == "tool"
    ]


def _texts(value: Any) -> list[str]:
    """All texts in a message except its role, including the keys of arguments."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for key, part in value.items() if key != "role" for text in (*_texts(key), *_texts(part))]
    return [text for part in value for text in _texts(part)] if isinstance(value, list | tuple) else []


def _mapped(value: Any, change: Any) -> Any:
    """A copy of a message with every text changed except its role."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): part if key == "role" else _mapped(part, change) for key, part in value.items()}
    return [_mapped(part, change) for part in value] if isinstance(value, list | tuple) else value
