"""Reward for an answer that is mathematically equal to the label."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from slime.plugin import Context, Reward, Sample
from slime_rewards.extraction import answer_in, describe, label_of, last_boxed
from slime_rewards.options import MathOptions

# The library's own timeouts need signals, which work only in a main thread and cannot interrupt C code. They are
# disabled below, since the worker process's deadline covers both cases, and so is the library's warning about that.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_PERCENT, _ESCAPED = re.compile(r"(?<!\\)%"), r"\\%"


class MathAnswer:
    r"""1.0 if `math-verify` finds the last expression of the answer equal to the label, else 0.0.

    The expression is the last `\boxed{...}`, else the last LaTeX formula, else the last number or plain expression in
    the last `tail_chars` characters. All forms of a value are equal: 1/2, 0.5, \frac{1}{2}, 50\%. Sets and intervals
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
        gold = _label_expressions(label_of(sample))
        if not gold:
            raise ValueError(f"{describe(sample)} has the label {sample.label!r:.100}, expected an expression")
        answer = answer_in(sample.response, self._options)
        found = [] if answer is None else _expressions(answer[-self._options.tail_chars :])
        equal = bool(found) and verify(
            gold, found, float_rounding=self._options.digits, strict=self._options.strict, timeout_seconds=None
        )
        return Reward(float(equal), {"parsed": float(bool(found))})


def _label_expressions(label: str) -> list[Any]:
    """The expressions of a label. A label without `$` or box is read as LaTeX as a whole, or else as plain text."""
    if "$" not in label and last_boxed(label) is None:
        whole = parse(f"${_PERCENT.sub(_ESCAPED, label.strip())}$", [LatexExtractionConfig()], parsing_timeout=None)
        if whole and not isinstance(whole[0], str):
            return list(whole)
    return _expressions(label)


def _expressions(text: str) -> list[Any]:
    """What `math-verify` finds in the text: an expression of sympy and the text it came from, or nothing."""
    boxed = last_boxed(text)
    if boxed is not None:
        text = f"${boxed}$"
    return list(parse(text, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None))
