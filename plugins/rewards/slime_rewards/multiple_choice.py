"""Reward for choosing the label's letter or number."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slime.plugin import Context, Reward, Sample
from slime_rewards.extraction import answer_in, describe, label_of, last_boxed
from slime_rewards.options import MultipleChoiceOptions

_CHOICE = r"[(\[{*$`\"']{0,4}\s{0,4}([A-Za-z]|\d{1,2})\s{0,4}[)\]}*$`\"'.:,;]{0,4}"
_ONLY = re.compile(rf"\s*{_CHOICE}\s*")
_STYLE = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit)(?=\s*\{)")
#: "the answer is (B)", "Answer: B", "option B", "choice **C**". After "answer", `a` and `I` before another word are
#: words, not choices; the first digits of 1.5 and 1,000 are not choices either.
_SAID = re.compile(
    r"\b(?:(answer)|option|choice)\b(?:\s{1,4}is)?\s{0,4}[:=]?[*\s]{0,4}[(\[{$`\"']{0,4}"
    r"(?(1)(?!(?-i:[aI])\s{1,4}\w))([A-Za-z]|\d{1,2})(?![\w']|[.,]\d)",
    re.IGNORECASE,
)
#: characters at the end of the answer that are searched
_TAIL = 10_000


class MultipleChoice:
    r"""1.0 if the response makes the label's choice, else 0.0.

    A choice is a letter, in either case, or a number of at most two digits, with or without brackets and punctuation.
    The response's choice is the first of these that exists: the last `\boxed{B}`; the last "answer is (B)", "Answer: B"
    or "option B"; with `bare`, the last line of the answer if it consists of a choice. A response without a choice gets
    0, and part `chosen` is then 0. Letters in running text are never taken for a choice.

    A sample without label, or whose label is not a choice, raises `ValueError` and fails.
    """

    def __init__(self, options: MultipleChoiceOptions, context: Context) -> None:  # noqa: ARG002 - the contract
        self._options = options

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Reward:
        label = _only(label_of(sample))
        if label is None:
            raise ValueError(f"{describe(sample)} has the label {sample.label!r:.100}; expected one letter or number")
        choice = self._choice(sample.response)
        return Reward(float(choice == label), {"chosen": float(choice is not None)})

    def _choice(self, response: str) -> str | None:
        answer = answer_in(response, self._options)
        if answer is None:
            return None
        answer = answer[-_TAIL:]
        boxed = last_boxed(answer)
        if boxed is not None and (choice := _only(_STYLE.sub("", boxed))) is not None:
            return choice
        said = _SAID.findall(_STYLE.sub("", answer))
        if said:
            return str(said[-1][1]).upper()
        if not self._options.bare:
            return None
        return _only(answer.strip().rsplit("\n", 1)[-1])


def _only(text: str) -> str | None:
    """The choice that a text consists of; None for any other text."""
    found = _ONLY.fullmatch(text) if len(text) < 100 else None
    return found.group(1).upper() if found else None
