"""One prompt, one response."""

from __future__ import annotations

from slime.chat import Answers
from slime.plugin import Context, NoOptions, PolicyClient, Sample, SamplingParams


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
        answers = Answers()
        answers.add(answer)
        answers.fill(sample)
        return [sample]
