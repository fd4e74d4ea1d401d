"""slime's own buffer filters, which choose the groups of the next batch and drop others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slime.plugin import Context, Group, NoOptions, Selection
from slime_datasources.options import (
    BoundedStalenessOptions,
    KeepWithFallbackOptions,
    NonzeroVarianceOptions,
    ReplayOptions,
    StratifiedOptions,
)


class NonzeroVariance:
    """Drops groups whose rewards are all equal: group-relative estimators give them zero advantages.

    A group is kept if the highest and lowest rewards of its trainable samples differ by more than `tolerance`, in
    float64. Kept groups stay in the order of the buffer. Groups of equal rewards are dropped as `zero_variance`, and
    groups with fewer than two scored samples as `unscored`. (DAPO, arXiv 2503.14476, section 3.2, calls this dynamic
    sampling.)
    """

    def __init__(self, options: NonzeroVarianceOptions, context: Context) -> None:  # noqa: ARG002 - factory contract
        self._tolerance = options.tolerance

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep the first `want` groups whose rewards differ, and drop every group with equal rewards."""
        informative, others = _split(buffer, self._tolerance)
        return Selection(informative[:want], others)


class KeepWithFallback:
    """Keeps groups whose rewards differ, and fills up a batch that has too few of them with other groups.

    A group is informative if the highest and lowest rewards of its trainable samples differ by more than `tolerance`,
    in float64. If the buffer has enough informative groups for a batch, the others are dropped: as `zero_variance`, or
    as `unscored` if they have fewer than two scored samples. Otherwise no group is dropped, and the batch is filled
    with scored groups of equal rewards, then with unscored ones. So a batch never needs a second round of prompts.

    Use it as a buffer filter with --over-sampling-batch-size. As a sampling filter, which must decide about every group
    it gets, it drops nothing.
    """

    def __init__(self, options: KeepWithFallbackOptions, context: Context) -> None:  # noqa: ARG002 - factory contract
        self._tolerance = options.tolerance

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep the first `want` informative groups; if there are fewer, fill up with others."""
        informative, others = _split(buffer, self._tolerance)
        if len(informative) >= want > 0:
            return Selection(informative[:want], others)
        fallback = sorted(others, key=lambda index: others[index] == "unscored")
        return Selection((informative + fallback)[:want])


class NewestFirst:
    """Keeps the groups that were generated last. The others stay in the buffer.

    The groups with the smallest `Group.age` (rollouts since generation) are kept; of groups with equal age, the first
    in the buffer. They stay in the order of the buffer. The filter has a choice only if the buffer holds more than a
    batch: see --over-sampling-batch-size. To drop old groups, use `bounded_staleness`.
    """

    def __init__(self, options: NoOptions, context: Context) -> None:
        pass

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep the `want` youngest groups."""
        youngest = sorted(range(len(buffer)), key=lambda index: buffer[index].age)
        return Selection(sorted(youngest[:want]))


class BoundedStaleness:
    """Drops groups that waited for more than `max_age` rollouts, and keeps the oldest of the others.

    `Group.age` counts the rollouts since the one for which a group was generated; with `max_age` 0, a batch only has
    groups that were generated for it. Older groups are dropped as `stale`. Use it as a buffer filter: a sampling filter
    only gets new groups, whose age is 0. With --async, groups generated ahead do not count as older, since their batch
    is chosen as soon as they are generated.
    """

    def __init__(self, options: BoundedStalenessOptions, context: Context) -> None:  # noqa: ARG002 - factory contract
        self._max_age = options.max_age

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep the first `want` groups that are young enough, and drop every group that is too old."""
        stale = {index: "stale" for index, group in enumerate(buffer) if group.age > self._max_age}
        return Selection([index for index in range(len(buffer)) if index not in stale][:want], stale)


class HighestReward:
    """Keeps the groups with the highest mean reward. The others stay in the buffer.

    The mean is over the trainable samples. Of groups with equal means, the older one is preferred; groups without a
    scored sample come last. Kept groups stay in the order of the buffer, so that the best ones do not end up together
    in one optimizer step. The filter has a choice only if the buffer holds more than a batch: see
    --over-sampling-batch-size.
    """

    def __init__(self, options: NoOptions, context: Context) -> None:
        pass

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep the `want` best groups."""
        means = [_mean_reward(group) for group in buffer]
        best = sorted(range(len(buffer)), key=lambda index: math.inf if (m := means[index]) is None else -m)
        return Selection(sorted(best[:want]))


class Stratified:
    """Spreads a batch over the range of mean rewards. Groups that are not chosen stay in the buffer.

    The range from the lowest to the highest mean reward in the buffer (over the trainable samples) is divided into
    `strata` intervals of equal width. Groups are taken from the strata in turn, lowest stratum first and oldest group
    first; empty strata are skipped. Groups without a scored sample come last. Kept groups stay in the order of the
    buffer. The filter has a choice only if the buffer holds more than a batch: see --over-sampling-batch-size.
    """

    def __init__(self, options: StratifiedOptions, context: Context) -> None:  # noqa: ARG002 - factory contract
        self._strata = options.strata

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep `want` groups, the same number from each stratum as far as possible."""
        means = {index: mean for index, group in enumerate(buffer) if (mean := _mean_reward(group)) is not None}
        lowest, highest = min(means.values(), default=0.0), max(means.values(), default=0.0)
        strata: list[list[int]] = [[] for _ in range(self._strata)]
        for index, mean in means.items():
            share = (mean - lowest) / (highest - lowest) if highest > lowest else 0.0
            strata[min(int(share * self._strata), self._strata - 1)].append(index)
        in_turn = sorted(
            (turn, level, index) for level, stratum in enumerate(strata) for turn, index in enumerate(stratum)
        )
        unscored = [index for index in range(len(buffer)) if index not in means]
        return Selection(sorted([*(index for _, _, index in in_turn), *unscored][:want]))


class Replay:
    """Mixes new groups with groups that were trained on before. At least the share `fresh` of every batch is new.

    Groups that were trained on before (`Group.uses`, limited by --max-reuse) may fill the share 1 - `fresh` of a batch
    if their rewards differ and they are at most `max_age` rollouts old: the youngest first, then the least used. Older
    ones are dropped as `stale`, and those with equal rewards as `zero_variance`. New groups fill the rest, oldest
    first; if there are too few, more prompts are generated.
    """

    def __init__(self, options: ReplayOptions, context: Context) -> None:  # noqa: ARG002 - factory contract
        self._fresh = options.fresh
        self._max_age = options.max_age

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep used groups up to their share, and fill the batch with new ones."""
        drop: dict[int, str] = {}
        used: list[int] = []
        for index, group in enumerate(buffer):
            if not group.uses:
                continue
            if group.age > self._max_age:
                drop[index] = "stale"
            elif len(set(_rewards(group))) < 2:
                drop[index] = "zero_variance"
            else:
                used.append(index)
        used.sort(key=lambda index: (buffer[index].age, buffer[index].uses))
        # 0.55 * 100 is a little more than 55.
        again = used[: want - math.ceil(round(self._fresh * want, 6))]
        new = [index for index, group in enumerate(buffer) if not group.uses]
        return Selection(sorted([*new[: want - len(again)], *again]), drop)


def _rewards(group: Group) -> list[float]:
    """Rewards in float64 of the group's samples that were generated and scored."""
    return [float(value) for sample in group.samples if sample.trainable and (value := sample.reward_value) is not None]


def _mean_reward(group: Group) -> float | None:
    """Mean reward of the group's scored samples; None if it has none."""
    rewards = _rewards(group)
    return sum(rewards) / len(rewards) if rewards else None


def _split(buffer: Sequence[Group], tolerance: float) -> tuple[list[int], dict[int, str]]:
    """Indices of the groups whose rewards differ by more than `tolerance`, and the reason for each of the others."""
    informative: list[int] = []
    others: dict[int, str] = {}
    for index, group in enumerate(buffer):
        rewards = _rewards(group)
        if len(rewards) < 2:
            others[index] = "unscored"
        elif max(rewards) - min(rewards) <= tolerance:
            others[index] = "zero_variance"
        else:
            informative.append(index)
    return informative, others
