"""DAPO: group-relative advantages, decoupled clipping, token-level loss, and a penalty on overlong answers.

Source: DAPO (Yu et al., 2025, arXiv 2503.14476): equations 8 to 10 (clipping, advantage), 12 (token-level loss) and 13
(soft overlong punishment).
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.errors import ConfigError
from slime.plugin import Advantages, Context, EstimatorBatch
from slime_estimators.groups import group_relative
from slime_estimators.options import DAPOOptions
from slime_estimators.trained_tokens import TrainedTokens


class DAPO:
    """A_i = (r_i - mean(r)) / (std(r) + eps), where with `overlong_buffer` B and full length L
    (`--rollout-max-response-len`) the reward of a response of T tokens is first reduced by

        0 for T <= L - B;   penalty * (T - (L - B)) / B above;   penalty from T = L on.

    - T counts all response tokens, including masked ones: they use up the length.
    - Clipping is 0.2 below and 0.28 above unless the run sets it; the token-level loss is
      `--calculate-per-token-loss`, without which a run is refused; dynamic sampling is a sampling filter.
    - Groups of equal rewards, or of one rollout, get 0 as in GRPO. With the penalty, responses of different lengths no
      longer have equal rewards.
    """

    def __init__(self, options: DAPOOptions, context: Context) -> None:
        self._options = options
        self._longest = 0
        if options.overlong_buffer is not None:
            if context.config is None:
                raise ConfigError(
                    "dapo with overlong_buffer needs a run: the full length is --rollout-max-response-len"
                )
            self._longest = int(context.config.rollout.rollout_max_response_len)

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        """One advantage per response token: N x [T_i] float32."""
        tokens = TrainedTokens.of(batch.loss_masks)
        rewards = batch.rewards.double() - self._penalties(torch.tensor(tokens.lengths, dtype=torch.float64))
        relative = group_relative(batch, rewards, eps=self._options.eps)
        return Advantages(tokens.spread(relative[tokens.sample]))

    def _penalties(self, lengths: Tensor) -> Tensor:
        """[N] the penalty of each response's length [N]."""
        buffer = self._options.overlong_buffer
        if buffer is None:
            return torch.zeros_like(lengths)
        return self._options.overlong_penalty * ((lengths - (self._longest - buffer)) / buffer).clamp(0, 1)
