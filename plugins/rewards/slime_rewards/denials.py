"""The words that deny or doubt an answer, as regular expressions.

All rewards that look for an answer share them; each has its own rule of what follows from them.
"""

from __future__ import annotations

import re

#: not, isn't
NOT = r"(?:\b(?:not|never|cannot)\b|n['\u2019]t\b)"
#: words for a wrong answer: 5 (rejected), option A is incorrect
REFUSED = (
    r"\b(?:wrong|incorrect|invalid|false|extraneous|inadmissible|impossible|ruled\s{1,4}out"
    r"|(?:reject|exclude|eliminate|discard)(?:e?d)?)\b"
)
#: "valid" of "5 (not valid)", and "the right one"
APPROVED = r"(?:an?\s|the\s)?(?:valid|correct|right|possible|allowed|true|answer|solution)\b"
#: what rules out the answer behind it: we reject A
RULING_OUT = r"\b(?:(?:exclud|eliminat|reject|discard)\w*|rul\w+\s{1,4}out)"
#: words that leave an answer open: A, or maybe B
DOUBT = r"\b(?:maybe|perhaps|possibly|could|may|might)\b"
#: spaces and LaTeX between an answer and what is said of it
_GAP = r"(?:[\s*$}{\\]|(?<=\\)text[a-z]*)*+"
#: what denies the answer right before it, and says nothing else: 5 (rejected), 5, which is not valid, 5 is wrong. But
#: 5 rejected letters are 5, as are 5 invalid and 5 (reject -7); and 5 may be the largest amount where 5 is impossible.
TAKEN_BACK = re.compile(
    rf"{_GAP}(?:(?:[,:(][\s(]*+{_GAP}(?:(?:but\s)?(?:which|that|this|it)\s)?(?:(?:is|was)\s)?"
    rf"|which\s(?:is|was)\s|(?:is|was)\s(?!impossible))(?:(?:an?\s|the\s)?{REFUSED}|not\s{APPROVED})|rejected|extraneous)"
    r"(?:\s(?:answer|solution|root|value|one)\b)?"
    r"(?=\s(?:because|since|as|by|here)\b|\s*[.,;)}\]!?*]|\s*$)",
    re.IGNORECASE,
)
