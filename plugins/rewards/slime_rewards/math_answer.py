"""Reward for an answer that is mathematically equal to the label."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slime.plugin import Context, Reward, Sample
from slime_rewards.denials import APPROVED, NOT, REFUSED, TAKEN_BACK
from slime_rewards.extraction import BOX, describe, label_of, last_boxed, marked_in
from slime_rewards.mathematics import Answer, Formula, Words, equal, read
from slime_rewards.options import MathOptions

_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\[((?:(?!\\\[).)+?)\\\]|\\\(((?:(?!\\\().)+?)\\\)"
    r"|(?<!\\)\$((?:\\.|[^$\\])+?)(?<!\\)\$(?!\d)",  # and not the prices $18 and $20
    re.DOTALL,
)
#: what a sentence says to be the answer: 5, or the point (3, 4)
_SAID = re.compile(
    r"(?:\banswers?\b\**(?:\s+(?:is|are)\b\s*[:=]?|\s*[:=])|####)[*\s]*"
    r"(?:the\s+(?:ordered\s+)?(?:point|interval|pair|triple|vector|set|number|value|tuple)s?\s+(?=[$\\(\[{\d-]))?",
    re.IGNORECASE,
)
#: what is said not to be the answer, and where that ends: with the sentence, or where it says what is
_NOT = re.compile(r"(\banswers?\s+is)(?:\s+not|n['\u2019]t)\b", re.IGNORECASE)
_BUT = re.compile(
    r"(?P<but>(?:,|(?<=[^\s,]))\s++but(?:\s++rather)?(?=\s))|\s?[,;.\u2013\u2014]\s?it(?:['\u2019]s|\s++is)(?=\s)|\n|\.(?!\d)",
    re.IGNORECASE,
)
_NOT_THAT = re.compile(
    rf"(?:,\s*+(?:and\s+)?not(?!\s+{APPROVED}\s*+(?:[.,;)]|$))"
    r"|\s(?:rather\s+than|instead\s+of))\s(?:[^.,;()\n]|[.,]\d|\((?:[^()\n]|\([^()\n]*\))*\))*"
    # (not x = -5), but no word about the answer, as in (not valid)
    r"|\s?\((?:and\s+)?(?:not|rather\s+than|instead\s+of)\s(?:(?!(?<![A-Za-z\\])[A-Za-z]{2})[^()\n]|\([^()\n]*\))+\)",
    re.IGNORECASE,
)
#: a sentence that does not say one answer
_UNSURE = re.compile(r"\b(?:either|between|wrong|incorrect|or)\b", re.IGNORECASE)
#: what denies the answer right behind it, or the one before; a reason for an answer may deny something else
_DENIED = re.compile(rf"(?<!\bor ){NOT}(?:\s+(?:be|equal(?:\s+to)?|the\s+\w+))?[^\S\n]*$", re.IGNORECASE)
_REFUSED = re.compile(rf"{REFUSED}\s+$", re.IGNORECASE)
_RETRACTED = re.compile(
    rf"\b(?:that|this|it)(?:\s(?:is|was)|['\u2019]s)?\s?{NOT}\s(?:the\s)?(?:right|correct|answer)\b", re.IGNORECASE
)
#: characters of a line that says the answer, and beside an answer, that are read
_LINE, _BESIDE = 1_000, 40
#: words that are not part of a formula
_PROSE = re.compile(
    r"(?<![A-Za-z\\])(?!(?:sin|cos|tan|cot|sec|csc|ln|log|exp|sqrt|pi|inf|infinity|and|or)\b)[A-Za-z]{2,}"
)
_TIME = re.compile(r"\d{4}-\d\d-\d\d|\d{1,2}(?::[0-5]\d){1,2}(?: [ap]m)?", re.IGNORECASE)
_DIGITS = r"\d+(?:,\d{3})*(?:\.\d+)?|\.\d+"
#: a number in running text, with what belongs to it. A minus belongs to it unless it follows what it can be subtracted
#: from: 27-5 ends in 5.
_NUMBER = re.compile(
    rf"(?:(?<![\w)\]}}])[-+\u2212]\s?)?\$?(?:(?:{_DIGITS})[eE][-+]?\d+|\d+\s+\d+/\d+|\d*[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]"
    rf"|(?:{_DIGITS})(?:\s*(?:/|\^|\*\*|[\u00d7*]\s*10\s*\^)\s*-?(?:{_DIGITS}))*)"
    r"(?:\s*(?:\\?%|!(?!\w)|percent\b|per cent\b)"
    r"|\s+(?:hundred|thousand|million|billion|trillion|dozen|squared|cubed|factorial)\b)?"
)


class MathAnswer:
    r"""1.0 if the answer equals the label as mathematics, else 0.0.

    The answer is the last `\boxed{...}`, else what follows the last "answer is", "Answer:" or `####`, else the last
    LaTeX formula, else the last number, in the last `tail_chars` characters; with `boxed` it is the last box in these
    characters or none. A box is read as a formula, with or without `$`. All forms of a value are equal: 1/2, 0.5,
    \frac{1}{2}, 50\%; a unit behind a number is ignored, unless both have one and they differ. Sets are compared by
    their members, tuples and intervals by their parts, equations up to a factor, and words literally. A response
    without answer gets 0, and part `parsed` is then 0. Numbers too large to compute, such as towers of powers, equal
    only the same text.

    A sample without label, or with an empty one, raises `ValueError` and fails.
    """

    def __init__(self, options: MathOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._options = options

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Reward:
        label = _answer_of_label(label_of(sample))
        if label is None:
            raise ValueError(f"{describe(sample)} has the label {sample.label!r:.100}, expected an answer")
        found = self._found(sample.response)
        right = found is not None and equal(label, found, self._options.digits, strict=self._options.strict)
        return Reward(float(right), {"parsed": float(found is not None)})

    def _found(self, response: str) -> Answer | None:
        """The answer of a response."""
        answer = marked_in(response, self._options)
        if answer is None:
            return None
        answer = answer[-self._options.tail_chars :]
        if (boxed := last_boxed(answer)) is not None:
            return read(boxed)
        # A response that was cut off in a box has not given its answer.
        return None if self._options.boxed or BOX.search(answer) else _in_text(answer)


def _answer_of_label(label: str) -> Answer | None:
    """The answer of a label: its box, or what follows "Answer:" or `####` in it, or else the whole label."""
    if (boxed := last_boxed(label)) is not None:
        return read(boxed)
    said = list(_SAID.finditer(label))
    return read(label[said[-1].end() :] if said else label)


def _in_text(text: str) -> Answer | None:
    """The answer that a text without a box gives."""
    text = _without_denied(text)
    for said in list(_SAID.finditer(text))[-1:]:
        after = text[said.end() : said.end() + _LINE].strip()
        line = _NOT_THAT.sub("", after.partition("\n")[0])
        whole = read(line.strip("* ").rstrip("*. "))
        if (isinstance(whole, Formula) and not _PROSE.search(line)) or _is_unsure(line):
            return whole
        if (formula := _FORMULA.match(after)) is not None:
            return None if TAKEN_BACK.match(after, formula.end()) else read(_inner(formula))
        if isinstance(whole, Formula) or _is_time(whole):
            return whole
        if (first := _NUMBER.search(line)) is not None:
            return None if TAKEN_BACK.match(line, first.end()) else read(first[0])
        if whole is not None and len(line.split()) <= 4:
            return whole
    if len(text) <= 200 and not _PROSE.search(text):
        whole = read(text.strip("*\n ").rstrip("*.\n "))
        if isinstance(whole, Formula) or _is_time(whole):
            return whole
    for formula in reversed(list(_FORMULA.finditer(text))):
        if isinstance(inside := read(_inner(formula)), Formula):
            return inside if not _is_denied(text, formula) else None
    numbers = list(_NUMBER.finditer(text))
    return read(numbers[-1][0].strip()) if numbers and not _is_denied(text, numbers[-1]) else None


def _without_denied(text: str) -> str:
    """The text without what it says not to be the answer: "The answer is 8" of "The answer isn't 7, it's 8"."""
    kept, at = [], 0
    for denied in _NOT.finditer(text):
        if denied.start() < at:
            continue
        kept.append(text[at : denied.start()])
        end = _BUT.search(text, denied.end())
        at = len(text) if end is None else end.end()
        if end is None or end[0] in ("\n", "."):
            at = at if end is None else end.start()
        elif end["but"] or not _PROSE.search(text[at : at + _LINE].partition("\n")[0]):
            kept.append(denied[1])
    return "".join([*kept, text[at:]])


def _is_time(answer: Answer | None) -> bool:
    """Whether it is a date, or the time of a clock, which are words."""
    return isinstance(answer, Words) and _TIME.fullmatch(answer.text) is not None


def _is_unsure(line: str) -> bool:
    """Whether a line that should say the answer says several, or denies the first that it says."""
    found = [one.start() for one in (_FORMULA.search(line), _NUMBER.search(line)) if one is not None]
    before = line[: min(found, default=0)].rstrip("([{*")
    denials = _DENIED.search(before), _REFUSED.search(before), _RETRACTED.search(line), _UNSURE.search(line)
    return any(denials)


def _is_denied(text: str, found: re.Match[str]) -> bool:
    """Whether a "not" stands right before it, or a "rejected" right behind it."""
    before = text[max(0, found.start() - _BESIDE) : found.start()]
    return _DENIED.search(before) is not None or TAKEN_BACK.match(text, found.end()) is not None


def _inner(formula: re.Match[str]) -> str:
    return next(inner for inner in formula.groups() if inner is not None)
