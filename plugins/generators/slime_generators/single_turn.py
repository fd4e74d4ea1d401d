"""One prompt, one response."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime.errors import DataError
from slime.kit.chat import Answers, Codec
from slime.plugin import Context, NoOptions, PolicyClient, Sample, SamplingParams, Status


class SingleTurn:
    """Asks the policy once and keeps its answer, token for token.

    `response` is the decoded text without end tokens and other special tokens, for rewards and people; it is never
    tokenized again. A sample that already has response tokens, because its generation was interrupted, is continued
    after them, for the rest of `max_new_tokens`.
    """

    def __init__(self, options: NoOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._codec = Codec(context.tokenizer)

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        """The sample with its response. Raises `DataError` for a sample without prompt tokens."""
        if not sample.tokens:
            raise DataError(f"sample {sample.index} has no prompt tokens")
        begun, answers = sample.response_length, Answers.of(sample)
        if begun:
            sampling = replace(sampling, max_new_tokens=sampling.max_new_tokens - begun)
            if sampling.max_new_tokens < 1:  # the run was resumed with a lower limit
                sample.status, sample.finish_reason = Status.TRUNCATED, "length"
                return [sample]
        answer = await policy.generate(sample.tokens, replace(sampling, routed_from=answers.routed_tokens))
        sample.loss_mask = _joined(sample.loss_mask, begun, [1] * len(answer.tokens))
        sample.rollout_log_probs = _joined(sample.rollout_log_probs, begun, answer.log_probs)
        sample.tokens = sample.tokens + answer.tokens
        sample.response_length = begun + len(answer.tokens)
        response = answer.tokens if not begun else sample.tokens[sample.prompt_length :]
        sample.response = self._codec.answer(response)
        answers.add(answer)
        answers.fill(sample)
        return [sample]


def _joined(before: list[Any] | None, begun: int, new: list[Any]) -> list[Any]:
    """One entry per token: first those of the `begun` earlier tokens, then the new ones."""
    return new if not begun else [*(before or [1] * begun), *new]
