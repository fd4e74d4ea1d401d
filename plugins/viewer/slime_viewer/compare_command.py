"""`slime compare`: two runs in the terminal: whether they differ, in which metrics, and in which settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.cli.arguments import Arguments
from slime.cli.output import Line, put, write
from slime.cli.text_layout import hanging, terminal_width
from slime_viewer.differences import (
    WINDOW,
    Difference,
    Ends,
    config_differences,
    identical_until,
    metric_ends,
    plugin_differences,
)
from slime_viewer.panels import panels
from slime_viewer.run_files import RunFolder
from slime_viewer.words import words

_HELP = f"""\
usage: slime compare RUN RUN [--all]

Print what differs between two run folders: metrics, as the means of the last
{WINDOW} steps that both have (of evaluations, the last one), those that differ by
more than their 95 % interval first; then configuration and plugins. Says if
both are identical.

  --all    every metric, instead of those that `slime show` has
  --help   this text
"""


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code. Raises `ConfigError`."""
    if not argv or {"-h", "--help"} & set(argv):
        write(_HELP)
        return 0 if argv else 2
    parser = Arguments("slime compare")
    parser.add_argument("first", metavar="RUN", type=Path)
    parser.add_argument("second", metavar="RUN", type=Path)
    parser.add_argument("--all", action="store_true")
    stated = parser.read(argv)
    first, second = RunFolder(stated.first), RunFolder(stated.second)
    for folder in (first, second):
        folder.metrics.refresh()
    put(_compared(first, second, every=stated.all))
    return 0


def _compared(first: RunFolder, second: RunFolder, *, every: bool) -> Iterator[Line]:
    yield ["A  ", (str(first.path), "bold")]
    yield ["B  ", (str(second.path), "bold")]
    config, plugins = config_differences(first, second), plugin_differences(first, second)
    if (until := identical_until(first.metrics, second.metrics)) is not None:
        yield [("identical", "bold green"), f": every reward, loss and evaluation is the same up to step {until}"]
    ends = {one.name: one for one in metric_ends(first.metrics, second.metrics)}
    shown = [name for one in (first, second) for panel in panels(one.metrics) for name in panel.metrics]
    # What was learned comes first. `dict` drops the names that both have.
    names = [name for name in dict.fromkeys([*sorted(shown, key=_is_less), *(ends if every else ())]) if name in ends]
    yield from _metrics([ends[name] for name in names])
    yield from _settings("configuration", config)
    yield from _settings("plugins", plugins)
    for folder in (first, second):
        for problem in folder.problems():
            yield from hanging(f"left out of {folder.path}: ", problem)


def _metrics(ends: Sequence[Ends]) -> Iterator[Line]:
    """What differs beyond its interval first, then what cannot be told apart, then what is the same."""
    if not ends:
        yield "metrics: none that both have"
        return
    # Of the mean of steps, a margin says that some of them differ; an evaluation has its own.
    same = [one for one in ends if len({*one.values}) == 1 and (not one.margins[0] or one.name.startswith("eval/"))]
    alike = [one for one in ends if one not in same and one.margins[0] is not None and not one.clear]
    unknown = [one for one in ends if one not in same and one.margins[0] is None]
    yield from hanging("", _steps(ends))
    for title, style, rows in (
        ("differ by more than their 95 % interval", "bold yellow", [one for one in ends if one.clear]),
        ("within their 95 % interval", "bold", alike),
        ("differ, interval unknown", "bold", unknown),
    ):
        if rows:
            yield ""
            yield [(title, style)]
            yield from _rows(rows)
    if same:
        yield ""
        told = (
            f"all {len(ends)} metrics"
            if len(same) == len(ends)
            else ", ".join(_title(one.name, unit=False) for one in same)
        )
        yield from hanging("the same: ", told)


def _steps(ends: Sequence[Ends]) -> str:
    """What is compared: "means of steps 14 to 23, the last that both have; evaluations at step 16"."""
    held = sorted({one.step for one in ends if one.name.startswith("eval/")})
    means = sorted({(one.since, one.step) for one in ends if not one.name.startswith("eval/")})
    parts = []
    if means:
        since, until = means[0][0], max(step for _, step in means)
        each = f" of each metric, up to {WINDOW}" if len(means) > 1 else ""
        parts.append(f"means of {_range(since, until)}, the last{each} that both have")
    if held:
        parts.append(f"evaluations at {_range(held[0], held[-1])}")
    return "; ".join(parts)


def _range(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _rows(ends: Sequence[Ends]) -> Iterator[Line]:
    cells: list[tuple[str, ...]] = [("", "A", "B", "B - A", "")]
    for one in ends:
        factor, (first, second), (half,) = words(one.name).factor, one.values, one.margins
        margin = "" if half is None else f"±{_figure(half * factor, 2)}"
        values = (_figure(value * factor, 4) for value in (first, second))
        cells.append((_title(one.name), *values, _figure((second - first) * factor, 3, "+"), margin))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    # A longer name gets a line of its own, so that the numbers fit beside the others.
    widths[0] = max((len(row[0]) for row in cells if len(row[0]) <= terminal_width() - sum(widths[1:]) - 10), default=0)
    for name, *numbers in cells:
        if len(name) > widths[0]:
            yield f"  {name}"
        line = f"  {name if len(name) <= widths[0] else '':<{widths[0]}}"
        line += "".join(f"  {cell:>{width}}" for cell, width in zip(numbers, widths[1:], strict=True))
        yield [(line.rstrip(), "" if name else "dim")]


def _figure(value: float, digits: int, sign: str = "") -> str:
    """A number with so many digits, or all of a larger one's whole part: 12,596 instead of 1.26e+04."""
    return f"{value:{sign},.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:{sign}.{digits}g}"


def _is_less(name: str) -> bool:
    """Whether a metric comes after what the runs have learned: the evaluations and the reward."""
    return not name.startswith(("eval/", "rollout/reward"))


def _title(name: str, *, unit: bool = True) -> str:
    """A metric in words."""
    called = words(name)
    title = f"held out: {called.title}" if name.startswith("eval/") else called.title
    return f"{title}, {called.unit}" if unit and called.unit else title


def _settings(title: str, found: Sequence[Difference]) -> Iterator[Line]:
    yield ""
    if not found:
        yield [(title, "bold"), ": the same"]
        return
    yield [(title, "bold")]
    names = max(len(one.name) for one in found)
    for one in found:
        first, second = map(_value, one.values)
        line = f"  {one.name:<{names}}  {first} -> {second}"
        if len(line) <= terminal_width():
            yield line
            continue
        yield f"  {one.name}"
        yield from hanging("    A  ", first)
        yield from hanging("    B  ", second)


def _value(value: Any) -> str:
    return "·" if value is None else str(value)
