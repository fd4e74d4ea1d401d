"""A tokenizer's chat template, used to render only the new messages of a conversation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any

from slime.errors import ConfigError
from slime.kit.chat.codec import Codec, without_ends
from slime.kit.readers.call_arguments import taken_arguments
from slime.kit.readers.tokenize import apply_template

#: placeholder for an answer when only the text after it is used; private-use characters, which mean nothing to
#: templates and tokenizers
_ANSWER = "\ue000answer\ue001"
#: content of a message of which it is found out whether a template shows it
_PROBE = "probe7391"


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
            ConfigError: If the tokenizer has no chat template.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "conversations need a chat template, and the tokenizer of --hf-checkpoint has none; set chat_template"
                " in its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._codec = Codec(tokenizer)
        self._variables = variables
        #: roles whose messages the template is known to show
        self._shown: set[str] = set()

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
            ConfigError: If the template refuses the messages.
        """
        if trusted:
            return self._codec.encode(self._render(messages, tools=tools))
        return self._encode_guarded(messages, lambda guarded: self._render(guarded, tools=tools), begins=True)

    def continuation(self, messages: Sequence[Mapping[str, Any]], after: Sequence[int]) -> list[int]:
        """Token ids between an answer and the next one: the answer's end, the messages, the generation prompt.

        Earlier turns are not rendered again, so a template that would trim them or drop their reasoning cannot change
        them.

        Args:
            messages: The messages after the answer; their contents are plain text.
            after: Token ids of the answer. Parts of the answer's end that they already contain, usually the end-of-turn
                token, are not repeated.

        Raises:
            ConfigError: If the template refuses the messages.
        """
        for role in sorted({str(message.get("role")) for message in messages}):
            self.require_shown(role)
        ids, end = self._encode_guarded(messages, self._render_after, begins=False), self._end_tokens
        last = after[-1] if after else None
        if last in self._codec.special or last in self._ends:
            # The turn has ended, so neither this token nor what the template writes before it is repeated.
            if last in end:
                return _without(ids, end[: end.index(last) + 1])
            if ids[:1] == [last]:  # the marker of the next role ends a turn
                return ids[1:]
            if last in self._ends:  # in place of the template's own
                if self._own_end is not None:
                    return _without(ids, end[: end.index(self._own_end) + 1])
                return self._encode_guarded(messages, self._render_after, begins=False, before=last)
        for length in range(min(len(end), len(after)), 0, -1):
            if list(after[-length:]) == end[:length] and ids[:length] == end[:length]:
                return ids[length:]
        return ids

    def text(self, tokens: Sequence[int]) -> str:
        """An answer as text for parsers, with all special tokens except those that end it."""
        return self._codec.decode(without_ends(tokens, self._ends), skip_special_tokens=False)

    def plain_text(self, tokens: Sequence[int], text: str | None = None) -> str:
        """An answer as text for people and rewards, without special tokens. `text`: its `text()`, if known."""
        answer = without_ends(tokens, self._ends)
        if text is not None and self._codec.special.isdisjoint(answer):
            return text
        return self._codec.decode(answer, skip_special_tokens=True)

    # --- rendering -----------------------------------------------------------------------------------

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
    ) -> str:
        def rendered(chat: Sequence[Mapping[str, Any]]) -> str:
            return apply_template(
                self._tokenizer,
                chat,
                tools=None if tools is None else list(tools),
                add_generation_prompt=generation_prompt,
                **self._variables,
            )

        try:
            return rendered(taken_arguments(messages, rendered))
        except Exception as error:  # the model's own template may raise anything
            raise ConfigError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error

    def _render_after(self, messages: Sequence[Mapping[str, Any]], *, with_calls: bool | None = None) -> str:
        """The text between the end of an answer's content and the next answer.

        Args:
            messages: The messages between.
            with_calls: Whether the answer makes the tool calls that the messages answer; None: if the template wants.
        """
        before: list[dict[str, Any]] = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _ANSWER}]
        calls = _calls_answered(messages)
        if with_calls is None:
            with_calls = bool(calls) and self._wants_calls
        if not with_calls:
            return self._after_placeholder(self._render([*before, *messages]))
        before[1]["tool_calls"] = calls
        whole, part = self._render([*before, *messages]), self._render(before, generation_prompt=False)
        return self._end + whole[len(self._common(whole, part)) :]

    @cached_property
    def _wants_calls(self) -> bool:
        """Whether the template only shows a tool's result after the call that it answers."""
        return not self._shows("tool", with_calls=False) and self._shows("tool", with_calls=True)

    def _shows(self, role: str, *, with_calls: bool) -> bool:
        try:
            return _PROBE in self._render_after([_probe(role)], with_calls=with_calls)
        except ConfigError:
            return False

    def require_shown(self, role: str) -> None:
        """Refuse a role whose messages the template leaves out without an error. Raises `ConfigError`."""
        if role in self._shown:
            return
        if not self._shows(role, with_calls=role == "tool" and self._wants_calls):
            self._render_after([_probe(role)])  # a template that refuses them says why
            raise ConfigError(
                f"the chat template leaves out messages of the role {role!r} after an answer, so the model would not"
                " see them. Use a model whose template shows them, or write them as another role"
            )
        self._shown.add(role)

    def _after_placeholder(self, text: str) -> str:
        _, found, after = text.partition(_ANSWER)
        if not found:
            raise ConfigError("the chat template does not print the content of an assistant's message")
        return after

    @cached_property
    def _end(self) -> str:
        """The text that closes an answer."""
        before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _ANSWER}]
        end = self._after_placeholder(self._render(before, generation_prompt=False))
        # Some templates close the last message differently, so only the common beginning counts, or else the control
        # token with which they close earlier ones.
        asked = {"role": "user", "content": _PROBE}
        try:
            later = self._after_placeholder(self._render([*before, asked]))
        except ConfigError:
            return end
        common = self._common(end, later)
        token = self._special.match(later) if end and not common and self._special is not None else None
        if token is None:
            return common
        # The token may as well begin the next message: then it is all that stands before the content, or stands there
        # in the first message too.
        opening, _, _ = later.partition(_PROBE)
        first, _, _ = self._render([asked]).partition(_PROBE)
        begins = first.endswith(opening) and self._tokenizer.convert_tokens_to_ids(token[0]) not in self._codec.ends
        return token[0] if opening[token.end() :].strip() and not begins else common

    @cached_property
    def _end_tokens(self) -> list[int]:
        return self._codec.encode_after(self._end)

    @cached_property
    def _own_end(self) -> int | None:
        """The control token with which the template ends an answer."""
        return next((token for token in self._end_tokens if token in self._codec.special), None)

    @cached_property
    def _ends(self) -> frozenset[int]:
        """Tokens that end an answer and are not part of its content."""
        return self._codec.ends if self._own_end is None else self._codec.ends | {self._own_end}

    def _common(self, one: str, other: str) -> str:
        """The common beginning of two texts, up to a control token of which they have only a part in common."""
        lengths = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        length = next(lengths, min(len(one), len(other)))
        for found in () if self._special is None else self._special.finditer(one):
            if found.start() < length < found.end():
                length = found.start()
        return one[:length]

    @cached_property
    def turn_end(self) -> int | None:
        """The control token after an answer, which may be the next role's marker; None if there is none.

        Raises:
            ConfigError: The template refuses a message after an answer.
        """
        first = self._codec.encode_after(self._render_after([_probe("user")]))
        return next((token for token in first if token in self._codec.special), None)

    @property
    def control_tokens(self) -> frozenset[int]:
        """Ids of the tokens that only the template and the model write."""
        return self._codec.special

    # --- encoding ------------------------------------------------------------------------------------

    def _encode_guarded(
        self,
        messages: Sequence[Mapping[str, Any]],
        render: Callable[[Sequence[Mapping[str, Any]]], str],
        *,
        begins: bool,
        before: int | None = None,
    ) -> list[int]:
        """Render and encode messages, with special tokens inside them as plain text.

        The text of such a token is cut after its first character and the pieces are encoded separately, so that none
        gives the control token. The cuts are marked before the template is applied, so that it can still trim and quote
        the contents.

        Args:
            messages: The messages.
            render: Their text.
            begins: Whether nothing stands before them.
            before: The token before them, if it is a control token.
        """
        special = self._special
        if special is None or not any(special.search(text) for message in messages for text in _texts(message)):
            pieces = [render(messages)]
        else:
            everything = "".join(text for message in messages for text in _texts(message))
            mark = next(mark for n in count() if (mark := f"\ue000{n}\ue001") not in everything)

            def cut(text: str) -> str:
                while special.search(text):
                    text = special.sub(lambda found: found[0][0] + mark + found[0][1:], text)
                return text

            pieces = render([_mapped(message, cut) for message in messages]).split(mark)
        first, *others = pieces
        ids = self._codec.encode(first) if begins else self._codec.encode_after(first, before)
        return ids + [token for piece in others if piece for token in self._codec.encode_after(piece)]

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        """Matches the texts of special and added tokens that have two characters or more."""
        added = {str(token) for token in getattr(self._tokenizer, "added_tokens_decoder", {}).values()}
        names = sorted((name for name in {*added, *self._tokenizer.all_special_tokens} if len(name) > 1), key=len)
        return re.compile("|".join(re.escape(name) for name in reversed(names))) if names else None


def _probe(role: str) -> dict[str, str]:
    return {"role": role, "content": _PROBE, "name": "tool", "tool_call_id": "call00000"}


def _without(tokens: list[int], start: list[int]) -> list[int]:
    """The tokens without those at their start, if they are there."""
    return tokens[len(start) :] if tokens[: len(start)] == start else tokens


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
