"""One prompt, one response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.plugin import Context, Generation, NoOptions, PolicyClient, Sample, SamplingParams, SpecInfo, Status

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


class SingleTurn:
    """Asks the policy once and keeps what it answered, token for token.

    `response` is the decoded text without special tokens; it is for rewards and people, and never goes back
    to token ids.
    """

    def __init__(self, options: NoOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._tokenizer = context.tokenizer

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        """The sample with its response.  Raises `ValueError` for one without prompt tokens."""
        if not sample.tokens:
            raise ValueError(f"sample {sample.index} has no prompt tokens")
        answer = await policy.generate(sample.tokens, sampling)
        sample.tokens = sample.tokens + answer.tokens
        sample.response_length = len(answer.tokens)
        sample.response = self._tokenizer.decode(answer.tokens, skip_special_tokens=True)
        sample.loss_mask = [1] * len(answer.tokens)
        sample.rollout_log_probs = answer.log_probs
        sample.weight_versions = answer.weight_versions
        sample.finish_reason = answer.finish_reason
        sample.spec_info = _spec_info(answer.meta)
        sample.status, sample.failure = _outcome(answer)
        return [sample]


def _outcome(answer: Generation) -> tuple[Status, str | None]:
    status = _STATUS.get(answer.finish_reason)
    if status is None:
        return Status.FAILED, f"unknown finish reason {answer.finish_reason!r}"
    if status is Status.ABORTED:
        reason = answer.meta.get("finish_reason")
        message = reason.get("message") if isinstance(reason, Mapping) else None
        return status, f"the engine aborted the request: {message or 'no reason given'}"
    return status, None


def _spec_info(meta: Mapping[str, Any]) -> SpecInfo:
    """Counters of speculative decoding; zeros where the engine reports none."""
    if "spec_verify_ct" not in meta:
        return SpecInfo()
    return SpecInfo(
        spec_accept_token_num=meta.get("spec_num_correct_drafts", 0),
        spec_draft_token_num=meta.get("spec_num_proposed_drafts", 0),
        spec_verify_ct=meta["spec_verify_ct"],
        completion_token_num=meta.get("completion_tokens", 0),
    )
