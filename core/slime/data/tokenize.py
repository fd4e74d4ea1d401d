"""Prompts to token ids, in one way everywhere: training, evaluation and checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from slime.data.dataset import PromptRow
from slime.errors import DataError

if TYPE_CHECKING:
    from slime.config.options import RolloutOptions


def tokenize_prompt(tokenizer: Any, prompt: str | list[dict[str, Any]], *, apply_chat_template: bool) -> list[int]:
    """Token ids [P] of a prompt, up to where the response begins.

    With `apply_chat_template` a chat, or a text as the one message of a user, is rendered by the tokenizer's
    template with its generation prompt.  No special tokens are added to what the prompt or the template
    says: a prompt that wants a begin-of-sequence token contains it.

    Raises `DataError` for a chat without `apply_chat_template`, a tokenizer without template, a template
    that refuses the messages, and a prompt that has no tokens.
    """
    if apply_chat_template:
        text = _render(tokenizer, [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    elif isinstance(prompt, str):
        text = prompt
    else:
        raise DataError("the prompt is a list of chat messages, which needs --apply-chat-template")
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise DataError(f"the prompt {text!r} has no tokens")
    return ids


def check_prompt_lengths(
    rows: Iterable[PromptRow], tokenizer: Any, *, apply_chat_template: bool, max_tokens: int
) -> int:
    """Tokenise all prompts; the length of the longest.

    Raises `DataError` with file and line for the first prompt of more than `max_tokens` tokens, and for
    one that cannot be tokenised.
    """
    longest = 0
    for row in rows:
        length = len(prompt_ids(row, tokenizer, apply_chat_template=apply_chat_template, max_tokens=max_tokens))
        longest = max(longest, length)
    return longest


def longest_prompt(rollout: RolloutOptions, response: int) -> int | None:
    """Tokens a prompt may have beside a response of `response` tokens; None where no limit is stated."""
    if rollout.rollout_max_prompt_len is not None:
        return rollout.rollout_max_prompt_len
    context = rollout.rollout_max_context_len
    return None if context is None else context - response


def prompt_ids(row: PromptRow, tokenizer: Any, *, apply_chat_template: bool, max_tokens: int | None) -> list[int]:
    """`tokenize_prompt` of a row, with its place in every error; at most `max_tokens` tokens."""
    try:
        ids = tokenize_prompt(tokenizer, row.prompt, apply_chat_template=apply_chat_template)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from None
    if max_tokens is not None and len(ids) > max_tokens:
        raise DataError(
            f"{row.where}: the prompt has {len(ids)} tokens, expected at most {max_tokens}."
            " Shorten it, or change --rollout-max-prompt-len, --rollout-max-context-len or --rollout-max-response-len."
        )
    return ids


def _render(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("--apply-chat-template needs a chat template, and the tokenizer of --hf-checkpoint has none")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # the boundary around the model's own template
        raise DataError(f"the chat template refuses the prompt: {type(error).__name__}: {error}") from error
    return str(text)
