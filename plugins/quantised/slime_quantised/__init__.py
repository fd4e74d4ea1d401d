"""Formats in which engines hold weights that the trainer does not train in: `--rollout-quantization`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import slime.plugin as sp

if TYPE_CHECKING:
    from slime.config import RunConfig

slime_api = 1


@sp.hookimpl
def slime_plan_lines(config: RunConfig, with_engines: bool) -> dict[str, list[str]]:
    if config.sync.rollout_quantization is None or not with_engines:
        return {}
    corrected = config.algorithm.off_policy_correction is not None or config.algorithm.off_policy_sequence_delta
    if corrected or config.algorithm.loss_type == "sft_loss":
        return {}
    return {
        "notes": [
            f"with --rollout-quantization {config.sync.rollout_quantization} the engines sample from another"
            " distribution than the trainer's, and nothing corrects for it: add --use-tis, or --off-policy-correction"
            " mask (docs/off-policy.md). logprob_gap_mean says how large the difference is"
        ]
    }
