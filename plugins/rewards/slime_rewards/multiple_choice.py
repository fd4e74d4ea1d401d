"""Reward for choosing the label's letter or number."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slime.plugin import Context, Reward, Sample
from slime_rewards.extraction import describe, label_of, last_boxed, marked_in, plain_text
from slime_rewards.options import MultipleChoiceOptions

_ONLY = re.compile(r"[(\[{*$`\"']{0,4}\s{0,4}([A-Za-z]|\d{1,2})\s{0,4}[)\]}*$`\"'.:,;]{0,4}")
_STYLE = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit)(?=\s*\{)")
#: a choice with its text in a box, "B. Paris" or "(B) 12", and any further one after it, "A) 1 or B) 2"
_WITH_TEXT = re.compile(r"\s*(?:[(\[]([A-Za-z]|\d{1,2})[)\]]|([A-Za-z])[).:])\s")
_FURTHER = re.compile(r"(?<![\w.])[(\[]?[A-Za-z][)\].:](?=\s|$)")
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
    The response's choice is the first of these that exists: the last box, if it has a choice (`\boxed{B}`,
    `\boxed{\text{(B)}}`, `\boxed{B. Paris}`); the last "answer is (B)", "Answer: B" or "option B"; with `bare`, the
    last line of the answer if it consists of a choice. With `boxed`, only the last box counts. A response without a
    choice gets 0, and part `chosen` is then 0. Letters in running text are never taken for a choice, nor are two
    choices in one box.

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
        answer = marked_in(response, self._options)
        if answer is None:
            return None
        answer = answer[-_TAIL:]
        boxed = last_boxed(answer)
        choice = None if boxed is None else _in_box(plain_text(boxed))
        if choice is not None or self._options.boxed:
            return choice
        if (choice := _said(answer)) is not None or not self._options.bare:
            return choice
        return _only(answer.rstrip().rpartition("\n")[2])


def _in_box(text: str) -> str | None:
    """The choice that the text of a box makes; None if it makes none, or several."""
    if (choice := _only(text) or _said(text)) is not None:
        return choice
    found = _WITH_TEXT.match(text)
    if found is None or _FURTHER.search(text, found.end()):
        return None
    return (found.group(1) or found.group(2)).upper()


def _said(text: str) -> str | None:
    """The choice of the last "answer is (B)" or the like."""
    found = _SAID.findall(_STYLE.sub("", text))
    return str(found[-1][1]).upper() if found else None


def _only(text: str) -> str | None:
    """The choice that a text consists of; None for any other text."""
    found = _ONLY.fullmatch(text.strip())
    return found.group(1).upper() if found else None
