"""Prompts to token ids, in one way everywhere: training, evaluation and checks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from slime.data.rows import PromptRow
from slime.errors import DataError

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.config.options import DataOptions, RolloutOptions

#: texts on which a tokenizer's batches must give what it gives for single texts
_PROBES = ("Hello, world! 1+2=", " é\n\t<|end|> <s>x</s>", "")


@dataclass(frozen=True)
class PromptFormat:
    """How a prompt becomes text."""

    apply_chat_template: bool
    #: further variables of the template
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, data: DataOptions) -> PromptFormat:
        """As a run states it."""
        return cls(data.apply_chat_template, data.apply_chat_template_kwargs)


#: texts as they are
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

    With `apply_chat_template` a chat, or a text as the one message of a user, is rendered by the tokenizer's
    template with its generation prompt, with `tools` and further variables.  No special tokens are added to what the
    prompt or the template says: a prompt that wants a begin-of-sequence token contains it.

    Raises `DataError` for a chat without `apply_chat_template`, a tokenizer without template, a template
    that refuses the messages or knows no tools, and a prompt that has no tokens.
    """
    text = prompt_text(tokenizer, prompt, tools, PromptFormat(apply_chat_template, template_kwargs or {}))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise DataError(f"the prompt {text!r} has no tokens")
    return ids


def prompt_text(
    tokenizer: Any, prompt: str | list[dict[str, Any]], tools: list[dict[str, Any]] | None, form: PromptFormat
) -> str:
    """The text that is tokenised.  Raises `DataError`, as `tokenize_prompt` does."""
    if form.apply_chat_template:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return _render(tokenizer, messages, tools, form.template_kwargs)
    if isinstance(prompt, str):
        return prompt
    raise DataError("the prompt is a list of chat messages, which needs --apply-chat-template")


def check_prompt_lengths(
    rows: Iterable[PromptRow],
    tokenizer: Any,
    *,
    apply_chat_template: bool,
    max_tokens: int,
    template_kwargs: Mapping[str, Any] | None = None,
) -> int:
    """Tokenise all prompts; the length of the longest.

    Raises `DataError` with file and line for the first prompt of more than `max_tokens` tokens, and for
    one that cannot be tokenised.
    """
    longest = 0
    for row in rows:
        ids = prompt_ids(
            row,
            tokenizer,
            apply_chat_template=apply_chat_template,
            max_tokens=max_tokens,
            template_kwargs=template_kwargs,
        )
        longest = max(longest, len(ids))
    return longest


def longest_prompt(rollout: RolloutOptions, response: int) -> int | None:
    """Tokens a prompt may have beside a response of `response` tokens; None where no limit is stated."""
    if rollout.rollout_max_prompt_len is not None:
        return rollout.rollout_max_prompt_len
    context = rollout.rollout_max_context_len
    return None if context is None else context - response


def longest_training_prompt(config: RunConfig) -> int | None:
    """Tokens that a prompt of the training data may have; None where no limit is stated.

    Supervised answers come with the data, however long; only sampled ones need room kept for them.  Where no context is
    stated it is the engines', by default the model's.
    """
    supervised = config.algorithm.loss_type == "sft_loss"
    rollout = config.rollout
    context = rollout.rollout_max_context_len or config.sglang.get("context_length")
    if context is None and config.checkpoint.hf_checkpoint is not None:
        context = _model_context(Path(config.checkpoint.hf_checkpoint))
    room = None if context is None else int(context) - (1 if supervised else rollout.rollout_max_response_len)
    return min((limit for limit in (rollout.rollout_max_prompt_len, room) if limit is not None), default=None)


def _model_context(folder: Path) -> int | None:
    """Tokens of the longest sequence a model is made for; None where its folder does not say so."""
    try:
        described = orjson.loads((folder / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    context = described.get("max_position_embeddings")
    return int(context) if isinstance(context, int) else None


def prompt_ids(
    row: PromptRow,
    tokenizer: Any,
    *,
    apply_chat_template: bool,
    max_tokens: int | None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """`tokenize_prompt` of a row, with its place in every error; at most `max_tokens` tokens."""
    try:
        ids = tokenize_prompt(
            tokenizer,
            row.prompt,
            apply_chat_template=apply_chat_template,
            tools=row.tools,
            template_kwargs=template_kwargs,
        )
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from None
    if max_tokens is not None and len(ids) > max_tokens:
        raise DataError(f"{row.where}{too_long(len(ids), max_tokens)}")
    return ids


def too_long(tokens: int, limit: int) -> str:
    """What is wrong with such a prompt, the rest of a sentence that begins with its place."""
    return (
        f": the prompt has {tokens} tokens, expected at most {limit}. Shorten it, leave such prompts out with"
        " --overlong-prompts drop, or change --rollout-max-prompt-len, --rollout-max-context-len or"
        " --rollout-max-response-len."
    )


class BatchEncoder:
    """Tokenises many texts at once where the tokenizer can, which is several times faster than one by one."""

    def __init__(self, tokenizer: Any) -> None:
        """A tokenizer of transformers, or anything with its `encode`."""
        self.tokenizer = tokenizer
        self._fast = _fast_part(tokenizer)

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of every text, without special tokens."""
        if self._fast is None:
            return [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [one.ids for one in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]


def _fast_part(tokenizer: Any) -> Any:
    """What tokenises in batches; None where there is nothing of the kind, or it would give other tokens."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
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
                "the row has tools, and the chat template of --hf-checkpoint has no place for them (it does not"
                " mention `tools`). Use a model whose template does, or drop --tool-key"
            )
        variables = {**variables, "tools": tools}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
    except Exception as error:  # the boundary around the model's own template
        raise DataError(f"the chat template refuses the prompt: {type(error).__name__}: {error}") from error
    return str(text)


def knows_tools(template: Any) -> bool:
    """Whether a chat template does anything with tools; templates by name are trusted."""
    return not isinstance(template, str) or re.search(r"\btools\b", template) is not None
