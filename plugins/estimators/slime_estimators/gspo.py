"""GSPO: group-relative advantages with the importance ratio of whole sequences.

Source: Group Sequence Policy Optimization (Zheng et al., 2025, arXiv 2507.18071), equations 5 to 7.
"""

from __future__ import annotations

from slime_estimators.grpo import GRPO


class GSPO(GRPO):
    """The advantages of GRPO, with a different ratio in the clipped objective:

        s = (pi(y) / pi_old(y)) ^ (1 / |y|) = exp(mean over trained tokens of log pi - log pi_old)

    which is the same for all tokens of a sequence. Because the spec has `ratio="sequence"`, the trainer computes it,
    with gradients through every token of the sequence, and applies the usual clipped surrogate.

    - A mean of many log-ratios moves far less than each of them, so the default clip range is the paper's: 3e-4 below
      and 4e-4 above.
    - A sequence of one trained token has the ratio of that token.
    - Groups of equal rewards, or of one rollout, get 0 as in GRPO.
    """
