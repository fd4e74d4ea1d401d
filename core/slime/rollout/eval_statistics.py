"""What the rewards of an evaluation set say: mean@n, pass@k, and how far both could be chance.

One prompt is asked n times; each answer is an *attempt* with one reward.  P prompts.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: a reward that misses the threshold by less is at it: sums of weighted rewards are rarely exact
TOLERANCE = 1e-6
#: share of resampled means inside an interval
CONFIDENCE = 0.95
#: how often the prompts are resampled
RESAMPLES = 2000
#: prompts x resamples drawn at a time
_DRAWN_AT_ONCE = 2_000_000


@dataclass(frozen=True)
class Interval:
    """Between `low` and `high` lie 95 % of the means of resampled prompts."""

    low: float
    high: float


@dataclass(frozen=True)
class SetStatistics:
    """One set's numbers."""

    #: mean reward over all attempts of all prompts
    mean: float
    #: k -> probability that at least one of k answers passes
    pass_at: dict[int, float]
    #: of the mean, and of pass@k by k; None with fewer than two prompts, which tell nothing of others
    mean_interval: Interval | None
    pass_intervals: dict[int, Interval]


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The chance that of `k` attempts, drawn from `n` of which `passed` pass, at least one passes.

    1 - C(n - c, k) / C(n, k): the unbiased estimate of pass@k from n attempts (Chen et al., 2021, "Evaluating Large
    Language Models Trained on Code", equation 1), as a product that overflows nowhere.  Raises `ValueError` unless
    0 <= passed <= n and 1 <= k <= n.
    """
    if not (0 <= passed <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} attempts of which {passed} passed: expected 1 <= k <= n, 0 <= passed <= n")
    if n - passed < k:
        return 1.0
    # C(n - c, k) / C(n, k) = prod (1 - k / i) for i = n - c + 1 .. n
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - passed + 1, n + 1)))


def passes(reward: float, threshold: float) -> bool:
    """Whether an attempt with this reward counts as right."""
    return reward >= threshold - TOLERANCE


def statistics(
    rewards: Sequence[Sequence[float]], passed: Sequence[int], ks: Sequence[int], *, seed: int, name: str
) -> SetStatistics:
    """The numbers of one set.

    `rewards`: P x [n_i], `passed`: P counts.  The intervals are percentile bootstraps over the prompts (attempts at
    one prompt are not independent of each other), drawn from `seed` and the set's `name`, so that they repeat.
    Raises `ValueError` for a k above the number of attempts at any prompt.
    """
    columns: dict[int, list[float]] = {0: [float(np.mean(row)) for row in rewards]}
    for k in ks:
        columns[k] = [pass_at_k(len(row), count, k) for row, count in zip(rewards, passed, strict=True)]
    intervals = bootstrap(columns, seed=seed, name=name)
    return SetStatistics(
        mean=float(np.mean(columns[0])),
        pass_at={k: float(np.mean(columns[k])) for k in ks},
        mean_interval=intervals.get(0),
        pass_intervals={k: intervals[k] for k in ks if k in intervals},
    )


def bootstrap(columns: Mapping[int, Sequence[float]], *, seed: int, name: str) -> dict[int, Interval]:
    """Column -> 95 % interval of its mean; empty with fewer than two prompts.  All columns share the resamples."""
    values = np.array(list(columns.values()), dtype=np.float64).T  # [P, columns]
    prompts = len(values)
    if prompts < 2:
        return {}
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    means: list[NDArray[np.float64]] = []
    at_once = max(1, _DRAWN_AT_ONCE // prompts)
    for first in range(0, RESAMPLES, at_once):
        drawn = random.integers(0, prompts, (min(at_once, RESAMPLES - first), prompts))
        means.append(np.stack([column[drawn].mean(axis=1) for column in values.T], axis=1))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.concatenate(means), [tail, 100 - tail], axis=0)
    return {key: Interval(float(low[i]), float(high[i])) for i, key in enumerate(columns)}
