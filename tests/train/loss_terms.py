"""Objectives for tests of the loss."""

from __future__ import annotations

from typing import Any, Literal

from slime.config.options import AlgorithmOptions
from slime.plugin import Estimator, EstimatorSpec
from slime.train.loss import LossTerms
from slime.train.off_policy import Correction


def loss_terms(
    *,
    estimator: Estimator | None = None,
    ratio: Literal["token", "sequence"] = "token",
    correction: Correction | None = None,
    **options: Any,
) -> LossTerms:
    """A policy loss with these options of the run. A coefficient of the KL turns the KL on."""
    if correction is not None:
        options |= {"off_policy_correction": correction.mode, "off_policy_level": correction.level}
        options |= {"tis_threshold_low": correction.low, "tis_threshold": correction.high}
    chosen = AlgorithmOptions(use_kl_loss="kl_loss_coef" in options, **options)
    return LossTerms(chosen, estimator, EstimatorSpec(name="e", factory="nowhere:E", ratio=ratio))
