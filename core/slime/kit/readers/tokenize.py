"""Turns prompts into text, in one way for training, evaluation and checks, and a single one into token ids.

The readers of a run encode the texts of many prompts at once: `slime.kit.readers.feed.work`.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from slime.errors import DataError
from slime.kit.readers.call_arguments import called, taken_arguments
from slime.kit.readers.messages import ROLES
from slime.kit.readers.rows import PromptRow

if TYPE_CHECKING:
    from slime.config.options import DataOptions

#: texts on which batch encoding must agree with single encoding
_PROBES = ("Hello, world! 1+2=", " é\n\t<|end|> <s>x</s>", "")
#: stands for a content or role in the question whether a template prints it
_MARK = "slime-content-4711"


@dataclass(frozen=True)
class PromptFormat:
    """How a prompt is turned into text."""

    apply_chat_template: bool
    #: extra variables for the template
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, data: DataOptions) -> PromptFormat:
        """The format of a run's prompts."""
        return cls(data.apply_chat_template, data.apply_chat_template_kwargs)

    def showing(self, tools: Sequence[Mapping[str, Any]]) -> PromptFormat:
        """The same format, in which prompts without tools of their own show these."""
        shown = {"tools": list(tools)} if tools else {}
        return replace(self, template_kwargs={**self.template_kwargs, **shown})


#: prompts are text already
PLAIN = PromptFormat(apply_chat_template=False)


def tokenize_prompt(
    tokenizer: Any,
    prompt: str | list[dict[str, Any]],
    *,
    apply_chat_template: bool,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids [P] of a prompt, up to where the response begins.

    With `apply_chat_template`, the chat (or a text, as a single user message) is rendered by the tokenizer's template,
    including its generation prompt. No special tokens are added: a prompt that needs a begin-of-sequence token
    contains it.

    Args:
        tokenizer: A transformers tokenizer, or a `LightTokenizer`.
        prompt: Text, or chat messages.
        apply_chat_template: Whether to use the chat template.
        tools: Tool schemas for the template.
        template_kwargs: Extra variables for the template.

    Raises:
        DataError: A chat is given without `apply_chat_template`, the tokenizer has no template, the template refuses
            the messages or does not support tools, or the prompt has no tokens.
    """
    return _ids(tokenizer, prompt, tools, PromptFormat(apply_chat_template, template_kwargs or {}))


def _ids(
    tokenizer: Any, prompt: str | list[dict[str, Any]], tools: list[dict[str, Any]] | None, form: PromptFormat
) -> list[int]:
    text = prompt_text(tokenizer, prompt, tools, form)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise DataError(f"the prompt {text!r} has no tokens")
    return ids


def prompt_text(
    tokenizer: Any, prompt: str | list[dict[str, Any]], tools: list[dict[str, Any]] | None, form: PromptFormat
) -> str:
    """The text to tokenize. Raises `DataError`, as `tokenize_prompt` does."""
    if form.apply_chat_template:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return _render(tokenizer, messages, tools, form.template_kwargs)
    if isinstance(prompt, str):
        return prompt
    raise DataError("the prompt is a list of chat messages, which needs --apply-chat-template")


def prompt_ids(row: PromptRow, tokenizer: Any, form: PromptFormat, max_tokens: int | None) -> list[int]:
    """The token ids of a row's prompt, at most `max_tokens`; every error names the row. Raises `DataError`."""
    try:
        ids = _ids(tokenizer, row.prompt, row.tools, form)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from None
    if max_tokens is not None and len(ids) > max_tokens:
        raise DataError(f"{row.where}{too_long(len(ids), max_tokens)}")
    return ids


def too_long(tokens: int, limit: int) -> str:
    """The message for an overlong prompt; continues a sentence that starts with its location."""
    return (
        f": the prompt has {tokens} tokens, expected at most {limit}. Shorten it, or change --rollout-max-prompt-len,"
        " --rollout-max-context-len or --rollout-max-response-len (of evaluations --eval-max-prompt-len or"
        " --eval-max-response-len); --overlong-prompts drop leaves such prompts out of training."
    )


def backend_of(tokenizer: Any) -> Any:
    """The object of the `tokenizers` library that does the work of a tokenizer; None if there is none.

    None too for a class from a model folder, which may do more than its backend.
    """
    if type(tokenizer).__module__.startswith("transformers_modules."):
        return None
    return getattr(tokenizer, "backend_tokenizer", None)


def batch_backend(tokenizer: Any) -> Any:
    """The backend that encodes many texts at once, several times faster than one by one.

    None if there is none, or if it gives different tokens.
    """
    backend = backend_of(tokenizer)
    if not hasattr(backend, "encode_batch_fast") or backend.padding is not None or backend.truncation is not None:
        return None
    single = [tokenizer.encode(text, add_special_tokens=False) for text in _PROBES]
    batch = [one.ids for one in backend.encode_batch_fast(list(_PROBES), add_special_tokens=False)]
    return backend if single == batch else None


def _render(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise DataError("--apply-chat-template needs a chat template, and the tokenizer of --hf-checkpoint has none")
    if tools is not None:
        if not knows_tools(template):
            raise DataError(
                "the row has tools, and the chat template of --hf-checkpoint does not use them (it does not"
                " mention `tools`). Use a model whose template does, or drop --tool-key"
            )
        variables = {**variables, "tools": tools}

    def rendered(chat: Sequence[Mapping[str, Any]]) -> str:
        return apply_template(tokenizer, chat, add_generation_prompt=True, **variables)

    messages = taken_arguments(messages, rendered)

    def prints(number: int, part: str) -> bool | None:
        """Whether the template prints the role or the content of a message; None if it refuses a mark in its place."""
        marked = [*messages[:number], {**messages[number], part: _MARK}, *messages[number + 1 :]]
        with suppress(Exception):
            return _MARK in rendered(marked).lower()
        return None

    for number, message in enumerate(messages):
        role = str(message.get("role"))
        if role in ROLES or not isinstance(template, str) or re.search(rf"['\"]{re.escape(role)}['\"]", template):
            continue
        # A template that does not name the role may print any. Otherwise the message would pass for another role's.
        if not prints(number, "role"):
            raise DataError(
                f"message {number} has the role {role!r}, which the chat template does not name or print; expected"
                f" {', '.join(ROLES)}"
            )
    try:
        text = rendered(messages)
    except Exception as error:  # the boundary around the model's own template
        odd = (n for n, one in enumerate(messages) for call in called(one) if not _is_object(call.get("arguments")))
        place = next(odd, None)
        hint = "" if place is None else f". The arguments of a tool call in message {place} are no JSON object"
        raise DataError(f"the chat template refuses the prompt: {template_error(tokenizer, error)}{hint}") from error
    for number, message in enumerate(messages):
        content = message.get("content")
        if message.get("role") == "assistant" or not isinstance(content, str) or content.strip() in text:
            continue
        # Templates may cut or quote contents. Does this one print them at all?
        if prints(number, "content") is False:
            raise DataError(f"the chat template drops the content of message {number} (role {message['role']!r})")
    return text


def template_error(tokenizer: Any, error: Exception) -> str:
    """What a chat template raised, with the file and the line of the template."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename in ("<template>", "<unknown>")]
    line = getattr(error, "lineno", None) or next(reversed(lines), None)
    folder = Path(getattr(tokenizer, "name_or_path", ""))
    file = folder / "chat_template.jinja"
    where = "" if line is None else f"{file}:{line}: "
    if line is not None and not file.is_file():
        where = f"line {line} of chat_template in {folder / 'tokenizer_config.json'}: "
    return f"{where}{type(error).__name__}: {error}"


def _is_object(arguments: Any) -> bool:
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = orjson.loads(arguments)
    return isinstance(arguments, Mapping)


def apply_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """What the tokenizer's chat template makes of messages. Raises what the template raises.

    A message that only calls tools has the content null. A template that prints it as `None`, or fails, gets an empty
    one.
    """

    def rendered(chat: Iterable[Mapping[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template(list(map(dict, chat)), tokenize=False, **variables))

    if all(message.get("content", "") is not None for message in messages):
        return rendered(messages)
    emptied = [{**message, "content": message.get("content") or ""} for message in messages]
    text = empty = None
    with suppress(Exception):  # the model's own template may raise anything
        text = rendered(messages)
    if text is None:
        return rendered(emptied)
    with suppress(Exception):
        empty = rendered(emptied)
    return text if empty is None or text.count("None") <= empty.count("None") else empty


def knows_tools(template: Any) -> bool:
    """Whether a chat template mentions tools; named templates are assumed to."""
    return not isinstance(template, str) or re.search(r"\btools\b", template) is not None
