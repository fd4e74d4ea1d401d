"""The words that deny or doubt an answer, as regular expressions.

All rewards that look for an answer share them; each has its own rule of what follows from them.
"""

from __future__ import annotations

import re

#: not, isn't
NOT = r"(?:\b(?:not|never|cannot)\b|n['\u2019]t\b)"
#: how an answer is called that is none: 5 (rejected), option A is incorrect
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
#: what denies the answer right before it, and says nothing else: 5 (rejected), 5, which is not valid. But 5 rejected
#: letters are 5.
TAKEN_BACK = re.compile(
    rf"[\s,(*$}}\\]*+(?:text[a-z]*\s*\{{[\s,(]*+)?(?:which\s)?(?:(?:is|are|was|were)\s)?(?:{REFUSED}|not\s{APPROVED})"
    r"(?=\s(?:answer|solution|root|value|one|because|since|as|by|here)\b|\s*[^\w\s-]|\s*$)",
    re.IGNORECASE,
)
