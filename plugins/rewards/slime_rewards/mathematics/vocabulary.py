"""The words and commands that formulas are made of."""

from __future__ import annotations

import re


def _set(words: str) -> frozenset[str]:
    return frozenset(re.findall(r"\S+", words))


#: functions, with or without a backslash
FUNCTIONS = _set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp min max gcd lcm sqrt")
#: written without a backslash
NAMED = {"pi": r"\pi", "infinity": r"\infty", "inf": r"\infty", "oo": r"\infty", "infty": r"\infty"}
#: letters that are written as commands
GREEK = _set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon"
    " phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell"
)
#: commands whose argument makes one name of it
DECORATIONS = _set(
    "overline bar vec hat tilde overrightarrow overleftarrow widehat widetilde dot ddot mathcal mathfrak underline"
)
#: commands before the name of a figure
FIGURES = _set("angle triangle measuredangle odot parallelogram square")
#: commands that the grammar reads
PASSED = FUNCTIONS | _set(
    "times cdot pm mp cup cap setminus in leq geq neq infty emptyset to lfloor rfloor lceil rceil sum prod lim { } \\"
)
#: words between the members of a list
SEPARATORS = frozenset(("and", "or", ",", "及", "和", "或", "或者"))
#: words that multiply the number before
MAGNITUDES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
