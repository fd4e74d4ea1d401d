"""Reward for an answer that is mathematically equal to the label."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from slime.plugin import Context, Reward, Sample
from slime_rewards.extraction import describe, label_of, last_boxed, marked_in, plain_text
from slime_rewards.options import MathOptions

# The library's own timeouts need signals, which work only in a main thread and cannot interrupt C code. They are
# disabled below, since the worker process's deadline covers both cases, and so is the library's warning about that.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_Spellings: TypeAlias = tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]
#: LaTeX that the library does not read, and what is read instead
_LATEX_SPELLINGS: _Spellings = (
    # 1\,000
    (re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\})(?=\d{3}(?!\d))"), ""),
    # 0.1\overline{6}
    (re.compile(r"(?<![\w.])(\d*)\.(\d*)\\overline\s*\{(\d+)\}"), lambda found: _repeating(*found.groups())),
    # \frac\pi2
    (re.compile(r"(\\[dt]?frac)\s*(\\pi)\s*(\d)"), r"\1{\2}{\3}"),
)
_MAGNITUDES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
#: the same for a text that is known to be one formula
_FORMULA_SPELLINGS: _Spellings = (
    *_LATEX_SPELLINGS,
    # 5 million, 5 \text{ million people}
    (
        re.compile(rf"(?<=\d)(\s+|\s*\\(?:text|mathrm)\s*\{{\s*)({'|'.join(_MAGNITUDES)})\b"),
        lambda found: rf"\times {_MAGNITUDES[found[2]]}" + found[1],
    ),
    (re.compile(r"(?<!\\)%|(?<=\d)\s+(?:percent|per cent)\b"), r"\\%"),
    # 18 dollars, 5 square meters: words are read as products of letters
    (
        re.compile(
            r"^(\s*[-+]?(?:\\?\$)?[\d.,]+(?:\\times \d+)?)\s+"
            r"(?!and\b|or\b|plus\b|minus\b|times\b|over\b|choose\b|mod\b|sqrt\b)"
            r"[A-Za-z]{3,}(?:\s+[A-Za-z]{2,})*\s*\.?$"
        ),
        r"\1",
    ),
    # 2.5e-3
    (re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d+)(?![\w.])"), r"\1\\times 10^{\2}"),
    # 3 1/4
    (re.compile(r"(?<![\w.}^/])(\d+)\s+(\d+)/(\d+)(?![\w.])"), r"\1\\frac{\2}{\3}"),
)
_WORD = re.compile(r"\s*(?:[A-Za-z]{2,}(?:\s+[A-Za-z]+)*|\([A-Za-z]+\))\s*")
_DOLLAR = re.compile(r"(?<!\\)\$|\\[()]")
_NUMBER = re.compile(r"\s*[-+]?[\d.]+(?:[eE][-+]?\d+|\s+\d+/\d+)\s*\.?\s*")


class MathAnswer:
    r"""1.0 if `math-verify` finds the last expression of the answer equal to the label, else 0.0.

    The expression is the last `\boxed{...}`, else the last LaTeX formula, else the last number or plain expression in
    the last `tail_chars` characters; with `boxed` it is the last box in these characters or none. A box is read as a
    formula, with or without `$`. All forms of a value are equal: 1/2, 0.5, \frac{1}{2}, 50\%. Sets and intervals
    are compared by their members, equations by their solutions, and text that is not mathematics literally. A response
    without expression gets 0, and part `parsed` is then 0. If a computation does not end, such as a tower of powers,
    the worker process is killed at the reward's deadline and the sample fails.

    A sample without label, or with a label without expression, raises `ValueError` and fails.
    """

    def __init__(self, options: MathOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._options = options

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Reward:
        label = label_of(sample)
        gold = list(_label_expressions(label))
        if not gold:
            raise ValueError(f"{describe(sample)} has the label {sample.label!r:.100}, expected an expression")
        found = self._found(sample.response)
        # The library reads words as variables, but any word must not equal any other.
        if not self._options.strict and _WORD.fullmatch(plain_text(label)) is None:
            found = _renamed(found, gold)
        equal = bool(found) and verify(
            gold,
            found,
            float_rounding=self._options.digits,
            strict=True,
            allow_set_relation_comp=True,  # -2 <= x <= 7 is the interval [-2, 7]
            timeout_seconds=None,
        )
        return Reward(float(equal), {"parsed": float(bool(found))})

    def _found(self, response: str) -> list[Any]:
        """The expressions of a response."""
        answer = marked_in(response, self._options)
        if answer is None:
            return []
        answer = answer[-self._options.tail_chars :]
        return [] if self._options.boxed and last_boxed(answer) is None else _expressions(answer)


@functools.lru_cache(maxsize=1024)  # the samples of a prompt share their label
def _label_expressions(label: str) -> tuple[Any, ...]:
    """The expressions of a label. A label without `$` or box is read as LaTeX as a whole, or else as plain text."""
    if _DOLLAR.search(label) is None and last_boxed(label) is None:
        whole = parse(_formula(label), [LatexExtractionConfig()], parsing_timeout=None)
        if whole and not isinstance(whole[0], str):
            return tuple(whole)
    return tuple(_expressions(label))


def _expressions(text: str) -> list[Any]:
    """What `math-verify` finds in the text: an expression of sympy and the text it came from, or nothing."""
    boxed = last_boxed(text)
    if boxed is not None:
        text = _formula(boxed)
    elif _NUMBER.fullmatch(_DOLLAR.sub("", text)):
        text = _formula(text)
    else:
        text = _respelled(text, _LATEX_SPELLINGS)
    return list(parse(text, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None))


def _formula(text: str) -> str:
    """A text as one LaTeX formula, in spellings that the library reads."""
    return f"${_respelled(_DOLLAR.sub('', text).strip(), _FORMULA_SPELLINGS)}$"


def _renamed(found: list[Any], gold: list[Any]) -> list[Any]:
    """The expression with the names of the label's variables, in alphabetical order; unchanged if it has others.

    The library's own renaming depends on the order of a set, and so on the process.
    """
    if not found or not hasattr(found[0], "xreplace") or not hasattr(gold[0], "free_symbols"):
        return found
    own, other = (sorted(one.free_symbols, key=str) for one in (found[0], gold[0]))
    return [found[0].xreplace(dict(zip(own, other, strict=True))), *found[1:]] if len(own) == len(other) else found


def _respelled(text: str, spellings: _Spellings) -> str:
    for spelling, read in spellings:
        text = spelling.sub(read, text)
    return text


def _repeating(whole: str, fixed: str, repeated: str) -> str:
    r"""The fraction of a repeating decimal: `0.1\overline{6}` is 1/6."""
    denominator = 10 ** len(fixed) * (10 ** len(repeated) - 1)
    numerator = int(whole + fixed + repeated) - int(whole + fixed or "0")
    return rf"\frac{{{numerator}}}{{{denominator}}}"
