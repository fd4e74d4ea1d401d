"""How many tokens a prompt and a conversation may have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from slime.config import RunConfig

__all__ = ["context_tokens", "longest_training_prompt"]


def longest_training_prompt(config: RunConfig) -> int | None:
    """The most tokens a training prompt may have; None if there is no limit.

    Sampled responses need room in the context; supervised answers are part of the data.
    """
    supervised = not config.trains_policy
    rollout = config.rollout
    context = context_tokens(config)
    room = None if context is None else context - (1 if supervised else rollout.rollout_max_response_len)
    return min((limit for limit in (rollout.rollout_max_prompt_len, room) if limit is not None), default=None)


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
