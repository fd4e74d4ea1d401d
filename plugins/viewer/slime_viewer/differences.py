"""Runs side by side: what differs in their configuration, their plugins, their curves and their answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from slime.observe.metrics import eval_set_names
from slime_viewer.index import RunIndex
from slime_viewer.queries import prompt_means
from slime_viewer.run_files import Metrics, RunFolder

#: steps at the end of both runs that are averaged
WINDOW = 10
#: Student's t of a 95 % interval, for the mean of 3 to `WINDOW` differences: with two it would be 12.7
_T = (4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
#: what two runs learned, by the beginnings of metrics. Others, such as hits of a cache, depend on who came first
_LEARNED = ("rollout/reward", "rollout/response_length", "train/loss", "train/grad_norm")
#: entries of a configuration by which a run is named, at most, and characters of a value
_TOLD, _LONG = 4, 24
#: names of a run, which always differ
_NAMES = frozenset({"run.run_name", "run.output_dir"})
#: entries of plugins.json that say where a package lies, not what it is
_PLACES = frozenset({"url", "editable"})


@dataclass(frozen=True)
class Difference:
    """One entry that runs do not share: its value in each; None: it is missing."""

    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Ends:
    """One metric of several runs, at the end."""

    name: str
    #: the means are of the steps from `since` to `step` that all have
    since: int
    step: int
    values: tuple[float, ...]
    #: for each run but the first: half of the 95 % interval of its difference from the first, if it is known
    margins: tuple[float | None, ...]

    @property
    def clear(self) -> bool:
        """Whether a difference is larger than its interval."""
        first, *others = self.values
        pairs = zip(others, self.margins, strict=True)
        return any(margin is not None and abs(value - first) > margin for value, margin in pairs)


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


def differences(*contents: Mapping[str, Any]) -> list[Difference]:
    """The entries that differ, by name."""
    entries, missing = [flat(content) for content in contents], object()
    names = sorted({name for one in entries for name in one})
    return [
        Difference(name, tuple(one.get(name) for one in entries))
        for name in names
        if any(one.get(name, missing) != entries[0].get(name, missing) for one in entries[1:])
    ]


def config_differences(*runs: RunFolder) -> list[Difference]:
    """What differs in the configuration, but for the runs' names."""
    return [one for one in differences(*(run.config() for run in runs)) if one.name not in _NAMES]


def plugin_differences(*runs: RunFolder) -> list[Difference]:
    """What differs in the components used, with their packages, versions and options.

    Of a component in whose place another run has a different one, only its name: their options are not the same ones.
    """
    used = [run.plugins().get("used", {}) for run in runs]
    if not all(isinstance(one, dict) for one in used):
        return []
    found = [one for one in differences(*used) if any(value is not None for value in one.values)]
    replaced = tuple(one.name.removesuffix("id") for one in found if _told_by(one.name) == "id")
    return [
        one
        for one in found
        if (told := _told_by(one.name)) not in _PLACES and (told == "id" or not one.name.startswith(replaced))
    ]


def _told_by(name: str) -> str:
    """What an entry of plugins.json tells of a component, such as its `id`; nothing if it is one of its options."""
    return "" if ".options." in name else name.rpartition(".")[2]


def _is_seed(name: str) -> bool:
    return name.rpartition(".")[2].endswith("seed")


def told_apart(found: Sequence[Difference], names: Sequence[str]) -> list[str]:
    """What runs are called beside each other: by what differs in their configuration, such as `lr 0.0001, seed 2`.

    Where that is much, or the same for two, the run's own name stands.
    """
    # What goes through the runs as another entry does is said once: the seed of the run and that of its rollouts.
    columns: dict[str, tuple[str, ...]] = {}
    for one in sorted(found, key=lambda one: _is_seed(one.name)):
        values = _brief(one.values)
        if values not in columns.values():
            columns[one.name] = values
    ends = Counter(name.rpartition(".")[2] for name in columns)
    words = {name: end if ends[end := name.rpartition(".")[2]] == 1 else name for name in columns}
    told = [", ".join(f"{words[name]} {values[n]}" for name, values in columns.items()) for n in range(len(names))]
    seen = Counter(told)
    return [
        one if one and seen[one] == 1 and len(columns) <= _TOLD else name for one, name in zip(told, names, strict=True)
    ]


def _brief(values: Sequence[Any]) -> tuple[str, ...]:
    """Values of one entry as short texts: fractions with six digits, unless that makes two of them the same."""
    whole = ["none" if value is None else str(value) for value in values]
    rounded = [f"{value:.6g}" if isinstance(value, float) else said for value, said in zip(values, whole, strict=True)]
    told = rounded if len(set(rounded)) == len(set(whole)) else whole
    return tuple(said if len(said) <= _LONG else f"…{said[-_LONG:]}" for said in told)


def seed_sets(
    config: Sequence[Difference], plugins: Sequence[Difference], names: Sequence[str]
) -> list[dict[str, Any]]:
    """The numbers of the runs, those together that differ in their seeds alone, each with what sets it apart."""
    sets: dict[str, list[int]] = {}
    kept = [one for one in config if not _is_seed(one.name)]
    for number in range(len(names)):
        told = repr([one.values[number] for one in (*kept, *plugins)])
        sets.setdefault(told, []).append(number)
    firsts = [runs[0] for runs in sets.values()]
    apart = [replace(one, values=tuple(one.values[number] for number in firsts)) for one in kept]
    labels = told_apart(apart, [names[number] for number in firsts])
    return [{"label": label, "runs": runs} for label, runs in zip(labels, sets.values(), strict=True)]


def metric_ends(*runs: Metrics, window: int = WINDOW) -> list[Ends]:
    """The metrics of all runs, as means of the last steps that all have; of evaluations, the last one that all have.

    Differences from the first run that are larger than their 95 % interval come first. The interval is of the mean
    difference of the steps; of an evaluation, it follows from the intervals of both.
    """
    known = set.intersection(*(set(metrics.names) for metrics in runs))
    ends = []
    for name in [name for name in runs[0].names if name in known]:
        columns = [dict(zip(*metrics.series(name), strict=True)) for metrics in runs]
        held_out = name.startswith("eval/")
        shared = sorted(set.intersection(*(set(one) for one in columns)))[-(1 if held_out else window) :]
        if shared:
            values = tuple(fmean(one[step] for step in shared) for one in columns)
            halves = [_half(metrics, name, shared[-1]) for metrics in runs]
            margins = []
            for one, half in zip(columns[1:], halves[1:], strict=True):
                of_steps = None if held_out else _margin([one[step] - columns[0][step] for step in shared])
                known_both = halves[0] is not None and half is not None
                margins.append(math.hypot(halves[0] or 0.0, half or 0.0) if known_both else of_steps)
            ends.append(Ends(name, shared[0], shared[-1], values, tuple(margins)))
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
    names = {*first.names, *second.names}
    learned = [name for name in names if name.startswith(_LEARNED)]
    learned += [f"eval/{name}" for name in eval_set_names(names)]
    rows = ([metrics.rows[step] for step in steps[0][:shared]] for metrics in (first, second))
    same = all(one.get(name) == other.get(name) for one, other in zip(*rows, strict=True) for name in learned)
    return steps[0][shared - 1] if same and learned else None


def prompts_compared(runs: Sequence[RunIndex], kind: str, most: int) -> list[dict[str, Any]]:
    """The prompts that all runs have, by how much their mean rewards differ, at each one's last visit."""
    means = [prompt_means(run, kind) for run in runs]

    def spread(prompt: str) -> float:
        rewards = [one[prompt][0] for one in means]
        return max(rewards) - min(rewards)

    shared = sorted(set.intersection(*(set(one) for one in means)), key=lambda prompt: (-spread(prompt), prompt))
    names = ("reward", "visits", "group")
    return [
        {"prompt": prompt, "runs": [dict(zip(names, one[prompt], strict=True)) for one in means]}
        for prompt in shared[:most]
    ]
