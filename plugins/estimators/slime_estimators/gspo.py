"""GSPO: group-relative advantages with the importance ratio of whole sequences.

Source: Group Sequence Policy Optimization (Zheng et al., 2025, arXiv 2507.18071), equations 5 to 7.
"""

from __future__ import annotations

from slime_estimators.grpo import GRPO


class GSPO(GRPO):
    """The advantages of GRPO; what differs is the ratio that is clipped:

        s = (pi(y) / pi_old(y)) ^ (1 / |y|) = exp(mean over trained tokens of log pi - log pi_old)

    the same for all tokens of a sequence. The spec says `ratio="sequence"`, so the trainer computes it, with its
    gradient through every token of the sequence, and the usual clipped surrogate does the rest.

    - A mean of many log-ratios moves far less than each of them: unless the run sets one, the clip range is the
      paper's, 3e-4 below and 4e-4 above.
    - A sequence of one trained token has the ratio of that token.
    - Degenerate groups as in GRPO: 0.
    """
