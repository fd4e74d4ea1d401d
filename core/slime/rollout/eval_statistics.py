"""Statistics of an evaluation set: mean@n, pass@k, and their confidence intervals.

Each of P prompts is asked n times; each answer is an *attempt* with one reward.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

#: a reward this close below the threshold passes: sums of weighted rewards are rarely exact
TOLERANCE = 1e-6
#: share of the resampled means that an interval contains
CONFIDENCE = 0.95
#: number of resamples
RESAMPLES = 2000
#: maximum number of prompts x resamples drawn at a time, to bound memory
_DRAWN_AT_ONCE = 2_000_000


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The probability that at least one of `k` attempts passes, drawn from `n` attempts of which `passed` pass.

    1 - C(n - c, k) / C(n, k): the unbiased estimate of pass@k from n attempts (Chen et al., 2021, "Evaluating Large
    Language Models Trained on Code", equation 1), computed as a product that cannot overflow.

    Raises:
        ValueError: unless 0 <= passed <= n and 1 <= k <= n.
    """
    if not (0 <= passed <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} attempts of which {passed} passed: expected 1 <= k <= n, 0 <= passed <= n")
    if n - passed < k:
        return 1.0
    # C(n - c, k) / C(n, k) = prod (1 - k / i) for i = n - c + 1 .. n
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - passed + 1, n + 1)))


def passes(reward: float, threshold: float) -> bool:
    """Whether an attempt with this reward counts as passed."""
    return reward >= threshold - TOLERANCE


def statistics(
    rewards: Sequence[Sequence[float]], passed: Sequence[int], ks: Sequence[int], *, seed: int, name: str
) -> dict[str, float]:
    """The statistics of one set: `eval/NAME`, `eval/NAME/pass@K`, and the `/low` and `/high` of each.

    The intervals are percentile bootstraps over prompts, because attempts at one prompt are not independent of each
    other. A set with fewer than two prompts has none.

    Args:
        rewards: One list per prompt, with the reward of each attempt.
        passed: How many attempts passed, per prompt.
        ks: The k of pass@k.
        seed: Seeds the resampling, together with `name`.
        name: Name of the set.

    Raises:
        ValueError: If a k exceeds the number of attempts at a prompt.
    """
    columns = {f"eval/{name}": [float(np.mean(row)) for row in rewards]}
    for k in ks:
        counts = zip(rewards, passed, strict=True)
        columns[f"eval/{name}/pass@{k}"] = [pass_at_k(len(row), count, k) for row, count in counts]
    metrics = {column: float(np.mean(values)) for column, values in columns.items()}
    for column, (low, high) in bootstrap(columns, seed=seed, name=name).items():
        metrics |= {f"{column}/low": low, f"{column}/high": high}
    return metrics


def bootstrap(columns: Mapping[str, Sequence[float]], *, seed: int, name: str) -> dict[str, tuple[float, float]]:
    """The 95 % interval (low, high) of each column's mean; empty with fewer than two prompts.

    All columns share the resamples.
    """
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
    return {column: (float(low[i]), float(high[i])) for i, column in enumerate(columns)}
