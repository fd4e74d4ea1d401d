"""Reward for an answer that equals the label."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from slime.plugin import Context, Reward, Sample
from slime_rewards.extraction import answer_in, label_of, plain_text
from slime_rewards.options import ExactMatchOptions

# A minus belongs to the number unless it follows something it can be subtracted from: 27-5 ends in 5.
_NUMBER = re.compile(r"(?:(?<![\w)\]])[-+])?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)", re.ASCII)


class ExactMatch:
    r"""1.0 if the answer equals the label, ignoring white space around either, else 0.0.

    With `boxed`, the LaTeX around words and numbers is ignored too: `\boxed{\text{Paris}}` equals `Paris`.
    A sample without label raises `ValueError` and fails.
    """

    def __init__(self, options: ExactMatchOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._options = options

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return [Reward(float(self._matches(sample))) for sample in samples]

    def _matches(self, sample: Sample) -> bool:
        label = plain_text(label_of(sample)) if self._options.boxed else label_of(sample)
        answer = answer_in(sample.response, self._options)
        if answer is None:
            return False
        if self._options.extract == "last_number":
            number = _last_number(answer)
            return number is not None and number == _last_number(label)
        return self._text(answer) == self._text(label)

    def _text(self, text: str) -> str:
        return text.strip().casefold() if self._options.ignore_case else text.strip()


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
