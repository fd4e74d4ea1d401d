"""Two runs side by side: what differs in their configuration, their plugins, their curves and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from slime_viewer.index import RunIndex
from slime_viewer.queries import prompt_means
from slime_viewer.run_files import Metrics, RunFolder

#: steps at the end of both runs that are averaged
WINDOW = 10
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
    #: the last step that both have, and the means of the steps up to it
    step: int
    first: float
    second: float


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
    """The metrics of both runs, as means of the last steps that both have; evaluations and loose ones as they are."""
    known = set(second.names)
    ends = []
    for name in [name for name in first.names if name in known]:
        one, other = (dict(zip(*metrics.series(name), strict=True)) for metrics in (first, second))
        shared = sorted(one.keys() & other.keys())[-(1 if name.startswith("eval/") else window) :]
        if shared:
            ends.append(
                Ends(name, shared[-1], fmean(one[step] for step in shared), fmean(other[step] for step in shared))
            )
    return ends


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
