"""`slime compare`: two runs in the terminal: what differs in their configuration, plugins and curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.cli.arguments import Arguments
from slime.cli.text_layout import table
from slime.observe.terminal import printable
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

_HELP = f"""\
usage: slime compare RUN RUN [--all]

Print what differs between two run folders: configuration, plugins, and metrics
as the means of the last {WINDOW} steps that both have (of evaluations, the last
one), differences beyond their 95 % interval first. Says if both are identical.

  --all    every metric, instead of those that `slime show` has
  --help   this text
"""


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code. Raises `ConfigError`."""
    if not argv or {"-h", "--help"} & set(argv):
        print(_HELP, end="")
        return 0 if argv else 2
    parser = Arguments("slime compare")
    parser.add_argument("first", metavar="RUN", type=Path)
    parser.add_argument("second", metavar="RUN", type=Path)
    parser.add_argument("--all", action="store_true")
    stated = parser.read(argv)
    first, second = RunFolder(stated.first), RunFolder(stated.second)
    for folder in (first, second):
        folder.metrics.refresh()
    print(printable("\n".join(_compared(first, second, every=stated.all))))
    return 0


def _compared(first: RunFolder, second: RunFolder, *, every: bool) -> Iterator[str]:
    header = ["", first.name, second.name]
    if (until := identical_until(first.metrics, second.metrics)) is not None:
        yield f"identical: every reward, loss and evaluation is the same up to step {until}"
    for title, found in (
        ("configuration", config_differences(first, second)),
        ("plugins", plugin_differences(first, second)),
    ):
        yield f"{title}: {'the same' if not found else ''}".rstrip()
        if found:
            yield table(header, _rows(found), indent="  ")
    shown = (
        None if every else {name for one in (first, second) for panel in panels(one.metrics) for name in panel.metrics}
    )
    ends = [one for one in metric_ends(first.metrics, second.metrics) if shown is None or one.name in shown]
    yield "metrics:" if ends else "metrics: none that both have"
    if ends:
        rows = [
            [
                *(one.name, f"{one.first:.4g}", f"{one.second:.4g}", f"{one.second - one.first:+.3g}"),
                *(_interval(one), str(one.step)),
            ]
            for one in ends
        ]
        yield table([*header, "difference", "95 %", "until step"], rows, indent="  ")
        if any(one.clear for one in ends):
            yield "  !: the difference is larger than its 95 % interval"
    for folder in (first, second):
        yield from (f"left out of {folder.path}: {problem}" for problem in folder.problems())


def _rows(found: Sequence[Difference]) -> Iterator[list[str]]:
    return ([one.name, _value(one.first), _value(one.second)] for one in found)


def _interval(ends: Ends) -> str:
    return "·" if ends.margin is None else f"±{ends.margin:.2g}{' !' if ends.clear else ''}"


def _value(value: Any) -> str:
    return "·" if value is None else str(value)
