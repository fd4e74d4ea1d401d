"""Is the answer mathematically equal to the label?"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from slime.plugin import Context, Reward, Sample
from slime_rewards.answers import answer_in, label_of, last_boxed, named
from slime_rewards.options import MathOptions

# Its limits of time are signals, which only a main thread can have, and which cannot end a computation in C: the
# deadline of the worker process ends those too.  The library warns of exactly that.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_PERCENT, _ESCAPED = re.compile(r"(?<!\\)%"), r"\\%"


class MathAnswer:
    r"""1.0 where `math-verify` finds the last expression of the answer equal to the label, else 0.0.

    The answer is the last `\boxed{...}`, else the last LaTeX formula, else the last number or plain expression in the
    last `tail_chars` characters.  Equal are forms of one value: 1/2, 0.5, \frac{1}{2}, 50\%; sets and intervals by
    their members; equations by their solutions; text that is no mathematics literally.  A response without expression
    gets 0 (part `parsed` 0).  A computation without end, such as a tower of powers, is ended with its worker process
    at the reward's deadline, and the sample fails.

    A sample without label, or with a label in which there is no expression, cannot be scored: `ValueError`.
    """

    def __init__(self, options: MathOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._options = options

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Reward:
        gold = _label_expressions(label_of(sample))
        if not gold:
            raise ValueError(f"{named(sample)} has the label {sample.label!r:.100}, in which there is no expression")
        answer = answer_in(sample.response, self._options)
        found = [] if answer is None else _expressions(answer[-self._options.tail_chars :])
        equal = bool(found) and verify(
            gold, found, float_rounding=self._options.digits, strict=self._options.strict, timeout_seconds=None
        )
        return Reward(float(equal), {"parsed": float(bool(found))})


def _label_expressions(label: str) -> list[Any]:
    """A label is nothing but its expression, so that it need not say where that is: LaTeX first, else plain text."""
    if "$" not in label and last_boxed(label) is None:
        whole = parse(f"${_PERCENT.sub(_ESCAPED, label.strip())}$", [LatexExtractionConfig()], parsing_timeout=None)
        if whole and not isinstance(whole[0], str):
            return list(whole)
    return _expressions(label)


def _expressions(text: str) -> list[Any]:
    """What `math-verify` reads in the text: an expression of sympy and the text it came from, or nothing."""
    boxed = last_boxed(text)
    if boxed is not None:
        text = f"${boxed}$"
    return list(parse(text, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None))
