"""Two runs side by side: what differs in their configuration, their plugins, their curves and their answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from slime_viewer.index import RunIndex
from slime_viewer.queries import prompt_means
from slime_viewer.run_files import Metrics, RunFolder

#: steps at the end of both runs that are averaged
WINDOW = 10
#: Student's t of a 95 % interval, for the mean of 3 to `WINDOW` differences: with two it would be 12.7
_T = (4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
#: what two runs learned, by the beginnings of metrics. Others, such as hits of a cache, depend on who came first
_LEARNED = ("rollout/reward", "rollout/response_length", "train/loss", "train/grad_norm")
#: names of a run, which always differ
_NAMES = frozenset({"run.run_name", "run.output_dir"})
#: entries of plugins.json that say where a package lies, not what it is
_PLACES = frozenset({"url", "editable"})


@dataclass(frozen=True)
class Difference:
    """One entry that two runs do not share; None: it is missing."""

    name: str
    first: Any
    second: Any


@dataclass(frozen=True)
class Ends:
    """One metric of two runs."""

    name: str
    #: the means are of the steps from `since` to `step` that both have
    since: int
    step: int
    first: float
    second: float
    #: half of the 95 % interval of their difference, if it is known
    margin: float | None = None

    @property
    def clear(self) -> bool:
        """Whether the difference is larger than its interval."""
        return self.margin is not None and abs(self.second - self.first) > self.margin


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one: `section.key` -> value."""
    entries: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict) and value:
            entries |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
            entries |= flat({str(number): one for number, one in enumerate(value)}, f"{prefix}{name}.")
        else:
            entries[f"{prefix}{name}"] = value
    return entries


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """The entries that differ, by name."""
    one, other = flat(first), flat(second)
    missing = object()
    return [
        Difference(name, one.get(name), other.get(name))
        for name in sorted(one.keys() | other.keys())
        if one.get(name, missing) != other.get(name, missing)
    ]


def config_differences(first: RunFolder, second: RunFolder) -> list[Difference]:
    """What differs in the configuration, but for the runs' names."""
    return [one for one in differences(first.config(), second.config()) if one.name not in _NAMES]


def plugin_differences(first: RunFolder, second: RunFolder) -> list[Difference]:
    """What differs in the components used, with their packages, versions and options."""
    one, other = (folder.plugins().get("used", {}) for folder in (first, second))
    if not isinstance(one, dict) or not isinstance(other, dict):
        return []
    return [found for found in differences(one, other) if found.name.rpartition(".")[2] not in _PLACES]


def metric_ends(first: Metrics, second: Metrics, window: int = WINDOW) -> list[Ends]:
    """The metrics of both runs, as means of the last steps that both have; of evaluations, the last one that both have.

    Differences that are larger than their 95 % interval come first. The interval is that of the mean difference of the
    steps; of an evaluation, it follows from the intervals of both.
    """
    known = set(second.names)
    ends = []
    for name in [name for name in first.names if name in known]:
        one, other = (dict(zip(*metrics.series(name), strict=True)) for metrics in (first, second))
        held_out = name.startswith("eval/")
        shared = sorted(one.keys() & other.keys())[-(1 if held_out else window) :]
        if shared:
            halves = [_half(metrics, name, shared[-1]) for metrics in (first, second)]
            of_steps = None if held_out else _margin([other[step] - one[step] for step in shared])
            margin = of_steps if None in halves else math.hypot(*(half or 0.0 for half in halves))
            first_mean, second_mean = (fmean(values[step] for step in shared) for values in (one, other))
            ends.append(Ends(name, shared[0], shared[-1], first_mean, second_mean, margin))
    return sorted(ends, key=lambda one: not one.clear)


def _half(metrics: Metrics, name: str, step: int) -> float | None:
    """Half of the 95 % interval that an evaluation states."""
    row = metrics.rows[step]
    low, high = row.get(f"{name}/low"), row.get(f"{name}/high")
    return None if low is None or high is None else (high - low) / 2


def _margin(changes: Sequence[float]) -> float | None:
    return _T[len(changes) - 3] * stdev(changes) / math.sqrt(len(changes)) if 3 <= len(changes) <= WINDOW else None


def identical_until(first: Metrics, second: Metrics) -> int | None:
    """The last step of the shorter run, if both have learned the same at every step until then; else None.

    Rewards, lengths of answers, losses, gradients and evaluations are compared, and no times. One that only one run has
    is a difference.
    """
    steps = first.trained, second.trained
    shared = min(map(len, steps))
    if not shared or steps[0][:shared] != steps[1][:shared]:
        return None
    learned = [
        name
        for name in {*first.names, *second.names}
        if name.startswith(_LEARNED) or (name.startswith("eval/") and name.count("/") == 1)
    ]
    rows = ([metrics.rows[step] for step in steps[0][:shared]] for metrics in (first, second))
    same = all(one.get(name) == other.get(name) for one, other in zip(*rows, strict=True) for name in learned)
    return steps[0][shared - 1] if same and learned else None


def prompts_compared(first: RunIndex, second: RunIndex, kind: str, most: int) -> list[dict[str, Any]]:
    """The prompts of both runs by how much their mean rewards differ, at each one's last visit."""
    one, other = prompt_means(first, kind), prompt_means(second, kind)
    shared = sorted(one.keys() & other.keys(), key=lambda prompt: (-abs(one[prompt][0] - other[prompt][0]), prompt))
    return [
        {
            "prompt": prompt,
            "first": {"reward": one[prompt][0], "visits": one[prompt][1], "group": one[prompt][2]},
            "second": {"reward": other[prompt][0], "visits": other[prompt][1], "group": other[prompt][2]},
        }
        for prompt in shared[:most]
    ]
