"""GSPO: group-relative advantages with the importance ratio of whole sequences.

Source: Group Sequence Policy Optimization (Zheng et al., 2025, arXiv 2507.18071), equations 5 to 7.
"""

from __future__ import annotations

from slime_estimators.grpo import GRPO


class GSPO(GRPO):
    """The advantages of GRPO; what differs is the ratio that is clipped:

        s = (pi(y) / pi_old(y)) ^ (1 / |y|) = exp(mean over trained tokens of log pi - log pi_old)

    the same for all tokens of a sequence.  Its spec says `ratio="sequence"`, so the trainer forms it, with its gradient
    through every token of the sequence, and the usual clipped surrogate does the rest.

    - A mean of many log-ratios moves far less than one of them: the spec's clip range is the paper's, 3e-4 below and
      4e-4 above, where the run states none.
    - A sequence of one trained token has its token's ratio.
    - Degenerate groups as in GRPO: 0.
    """
