"""How far the importance ratio may move: what the run states, else what the estimator says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.plugin import EstimatorSpec

if TYPE_CHECKING:
    from slime.config.options import AlgorithmOptions

#: without an estimator there is no ratio, and the bounds are never looked at
UNUSED = (0.2, 0.2)


def clip_range(options: AlgorithmOptions, spec: EstimatorSpec | None) -> tuple[float, float]:
    """How far (below 1, above 1).  A stated lower range holds for the upper one too, unless that is stated as well."""
    low, high = UNUSED if spec is None else spec.clip_range
    if options.eps_clip is not None:
        low = high = options.eps_clip
    return low, high if options.eps_clip_high is None else options.eps_clip_high
