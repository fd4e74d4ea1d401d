"""Samples of generate functions, completed by what `slime.sessions.generate_single` has kept of their conversations."""

from __future__ import annotations

from typing import Any

from slime.errors import PluginContractError
from slime.plugin import Sample, Status
from slime.sessions import Session


def with_recorded(
    produced: list[Sample], session: Session | None, prompt: str | list[dict[str, Any]], prompt_tokens: list[int]
) -> list[Sample]:
    """What a function returned, a sample without tokens of its own replaced by one for each conversation.

    Text, reward, metadata and the rest stay as the function set them; tokens, log-probs, weight versions and status are
    the engine's.  Raises what the policy raised, and `PluginContractError` where it cannot be told what belongs to
    what.
    """
    if session is None:
        return produced
    if session.error is not None:
        raise session.error
    without = [sample for sample in produced if sample.response_length == 0 and sample.status is not Status.FAILED]
    if not without:
        return produced
    if len(without) > 1:
        raise PluginContractError(
            f"returned {len(without)} samples without tokens, expected one, of which slime makes one for each"
            " conversation; or set the tokens of each"
        )
    [asked] = without
    if session.aborted is not None:
        asked.status, asked.failure = Status.ABORTED, session.aborted
        return produced
    # The function may have appended to the prompt: it is part of the recorded conversation.
    text, mask = asked.response, asked.loss_mask
    asked.prompt, asked.tokens = prompt, prompt_tokens
    recorded = session.samples(asked)
    if not recorded:
        return produced
    if mask is not None:
        recorded[-1].loss_mask = _narrowed(mask, recorded[-1].loss_mask or [])
    if text:
        recorded[-1].response = text
    others = [sample for sample in produced if sample is not asked]
    return others + recorded


def _narrowed(mask: list[int], recorded: list[int]) -> list[int]:
    """The function's own mask, which may leave out some of the tokens that the policy wrote."""
    if len(mask) != len(recorded):
        raise PluginContractError(
            f"returned a loss_mask of {len(mask)} entries for a conversation of {len(recorded)} tokens after the"
            " prompt: leave it None, and what the policy wrote is trained on, or start from"
            " slime.sessions.build_loss_mask(sample)"
        )
    foreign = sum(1 for own, written in zip(mask, recorded, strict=True) if own and not written)
    if foreign:
        raise PluginContractError(f"returned a loss_mask with {foreign} tokens in it that the policy did not write")
    return mask
