"""Objectives for tests of the loss."""

from __future__ import annotations

from typing import Any, Literal

from slime.config.options import AlgorithmOptions
from slime.plugin import Estimator, EstimatorSpec
from slime.train.loss import LossTerms


def loss_terms(
    *,
    estimator: Estimator | None = None,
    ratio: Literal["token", "sequence"] = "token",
    correction: tuple[str, str, float, float] | None = None,
    **options: Any,
) -> LossTerms:
    """A policy loss with these options of the run. A coefficient of the KL turns the KL on.

    A `correction` is its mode, its level, and the lowest and highest weight.
    """
    if correction is not None:
        mode, level, low, high = correction
        options |= {"off_policy_correction": mode, "off_policy_level": level}
        options |= {"tis_threshold_low": low, "tis_threshold": high}
    chosen = AlgorithmOptions(use_kl_loss="kl_loss_coef" in options, **options)
    return LossTerms(chosen, estimator, EstimatorSpec(name="e", factory="nowhere:E", ratio=ratio))
