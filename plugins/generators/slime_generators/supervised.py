"""The label as the response: supervised fine-tuning through the same loop."""

from __future__ import annotations

from slime.errors import ConfigError, DataError
from slime.kit.chat import Codec
from slime.plugin import Context, PolicyClient, Sample, SamplingParams, Status
from slime_generators.options import SupervisedOptions


class Supervised:
    """The response is the label's tokens and the end-of-sequence token. No engine is used.

    A label that ends with the token already gets no second one.

    A response longer than `--rollout-max-response-len` is cut off there and TRUNCATED.
    """

    def __init__(self, options: SupervisedOptions, context: Context) -> None:
        """Initialize.

        Raises:
            ConfigError: `append_eos` is set and the tokenizer has no end-of-sequence token.
        """
        self._codec = Codec(context.tokenizer)
        self._end: list[int] = []
        if options.append_eos:
            if context.tokenizer.eos_token_id is None:
                raise ConfigError("the tokenizer has no end-of-sequence token; set append_eos to false")
            self._end = [context.tokenizer.eos_token_id]

    async def generate(
        self,
        sample: Sample,
        sampling: SamplingParams,
        policy: PolicyClient,  # noqa: ARG002 - the contract of generators
    ) -> list[Sample]:
        """The sample with its label as response. Raises `DataError` if it has no label or no prompt tokens."""
        if not sample.tokens:
            raise DataError(f"sample {sample.index} has no prompt tokens")
        if sample.label is None:
            raise DataError(f"sample {sample.index} has no label to learn from; check --label-key")
        label = self._codec.encode_after(sample.label, sample.tokens[-1])
        whole = label if self._end and label[-1:] == self._end else label + self._end
        response = whole[: sampling.max_new_tokens]
        cut = len(response) < len(whole)
        sample.tokens = sample.tokens + response
        sample.response_length = len(response)
        sample.response = (
            self._codec.answer(response) if cut or not self._codec.special.isdisjoint(label) else sample.label
        )
        sample.loss_mask = [1] * len(response)
        sample.finish_reason = "length" if cut else "stop"
        sample.status = Status.TRUNCATED if cut else Status.COMPLETED
        return [sample]
