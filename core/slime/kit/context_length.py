"""How many tokens a prompt and a conversation may have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from slime.config import RunConfig

__all__ = ["context_tokens", "longest_prompt", "longest_training_prompt", "response_tokens"]


def longest_training_prompt(config: RunConfig) -> int | None:
    """The most tokens a training prompt may have; None if there is no limit."""
    return longest_prompt(config, config.rollout.rollout_max_prompt_len, response_tokens(config))


def response_tokens(config: RunConfig) -> int:
    """Tokens that are kept free for a response in training: one if answers come from the data."""
    return config.rollout.rollout_max_response_len if config.trains_policy else 1


def longest_prompt(config: RunConfig, stated: int | None, response: int) -> int | None:
    """The most tokens a prompt may have; None if there is no limit.

    Args:
        config: The run's configuration, which limits the context.
        stated: The limit of an option for these prompts, if there is one.
        response: Tokens that a response may have.
    """
    context = context_tokens(config)
    room = None if context is None else context - response
    return min((limit for limit in (stated, room) if limit is not None), default=None)


def context_tokens(config: RunConfig) -> int | None:
    """Tokens that a conversation may have; None if the model does not say.

    That is `--rollout-max-context-len`, else the engines' context, which defaults to the model's.
    """
    context = config.rollout.rollout_max_context_len or config.sglang.get("context_length")
    if context is None and config.checkpoint.hf_checkpoint is not None:
        context = _model_context(Path(config.checkpoint.hf_checkpoint))
    return None if context is None else int(context)


def _model_context(folder: Path) -> int | None:
    """`max_position_embeddings` of a model folder; None if it does not state one."""
    try:
        described = orjson.loads((folder / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    context = described.get("max_position_embeddings")
    return int(context) if isinstance(context, int) else None
