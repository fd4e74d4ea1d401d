"""Formats in which engines hold weights that the trainer does not train in: `--rollout-quantization`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import slime.plugin as sp

if TYPE_CHECKING:
    from slime.config import RunConfig

slime_api = 1

_NOT_RUN = (
    "--rollout-quantization fp8 has not been run on GPUs: use --check-weight-update-equal at first. On Blackwell"
    " (compute capability 10) the first weight sync is refused (docs/off-policy.md)"
)


@sp.hookimpl
def slime_plan_lines(config: RunConfig, with_engines: bool) -> dict[str, list[str]]:
    if config.sync.rollout_quantization is None or not with_engines:
        return {}
    notes = [_NOT_RUN] if config.on_gpu else []
    corrected = config.algorithm.off_policy_correction is not None or config.algorithm.off_policy_sequence_delta
    if not corrected and config.algorithm.loss_type != "sft_loss":
        notes.append(
            f"with --rollout-quantization {config.sync.rollout_quantization} the engines sample from another"
            " distribution than the trainer's, and nothing corrects for it: add --use-tis, or --off-policy-correction"
            " mask (docs/off-policy.md). logprob_gap_mean says how large the difference is"
        )
    return {"notes": notes} if notes else {}
