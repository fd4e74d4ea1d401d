"""CISPO: clip the importance weight instead of the update.

Source: MiniMax-M1 (MiniMax, 2025, arXiv 2506.13585), section 3.1, equations 4 and 5.
"""

from __future__ import annotations

from torch import Tensor

from slime.plugin import TokenBatch
from slime_estimators.grpo import GRPO


class CISPO(GRPO):
    """The advantages of GRPO, with a different objective:

        loss = -sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A log pi        r = pi / pi_old, sg: no gradient

    Every token keeps a gradient, however far its ratio has moved; only its weight is bounded.

    - The paper has no lower bound and does not state its upper one. The spec's clip range is 1 below, which bounds
      nothing, and 4 above (weights up to 5: ScaleRL, Khatri et al., 2025, arXiv 2510.13786). `--eps-clip-high` alone
      adds no lower bound; `--eps-clip` sets one.
    - On policy (r = 1) its gradient equals the clipped surrogate's.
    - The paper averages over tokens: `--calculate-per-token-loss`.
    """

    def objective(self, tokens: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [M], and metrics [M] that are 1 where the weight is clipped."""
        ratio = tokens.log_ratio.detach().exp()
        low, high = 1 - tokens.eps_clip, 1 + tokens.eps_clip_high
        below, above = (ratio < low).float(), (ratio > high).float()
        loss = -ratio.clamp(low, high) * tokens.advantages * tokens.log_probs
        return loss, {"clip_fraction": below + above, "clip_fraction_low": below, "clip_fraction_high": above}
