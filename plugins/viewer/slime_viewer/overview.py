"""A whole run in the terminal, what matters first: its state, the verdict, its numbers, then where they come from."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from slime.cli.output import Line
from slime.cli.text_layout import UNLIMITED, hanging, terminal_width
from slime.observe.metrics import eval_set_names
from slime_viewer import queries
from slime_viewer.alerts import Counts, alerts
from slime_viewer.curves import Change, number, sparkline
from slime_viewer.index import RunIndex
from slime_viewer.panels import panels
from slime_viewer.progress import RunProgress, progress
from slime_viewer.run_files import Metrics, RunFolder
from slime_viewer.verdict import HEALTHY, LOOK, UNFINISHED, Verdict, duration, verdict
from slime_viewer.words import words

#: the metrics that come first, as the tiles of the page; the loss stands for a reward that a run does not have
_FIRST = (
    "rollout/reward_mean",
    "rollout/truncated_ratio",
    "train/logprob_gap_mean",
    "time/step",
    "rollout/tokens_per_s",
)
_THEMES = ("learning", "answers", "speed")
_STYLES = {HEALTHY: "bold green", LOOK: "bold yellow", UNFINISHED: "bold red"}
#: characters of a curve at most and at least, of a longer name, which gets a line of its own, and of a pipe's lines
_CURVE, _SHORTEST, _NAME, _PIPE = 60, 8, 34, 100
#: warnings and errors of the log that are shown
_EVENTS = 3
#: bytes of samples that are read
_READ_BYTES = 32 * 2**20


@dataclass(frozen=True)
class _Row:
    """One metric: its name, its change in words, and its curve."""

    name: str
    change: str
    values: Sequence[float]
    clear: bool
    share: bool = False
    #: beside the curve
    note: str = ""


def overview(folder: RunFolder) -> Iterator[Line]:
    """The run whose metrics have been read, in lines."""
    metrics, gone = folder.metrics, progress(folder)
    yield from _state(folder, gone)
    yield from _judged(folder, verdict(folder, gone, alerts(metrics, _counts(folder))))
    first = _FIRST if "rollout/reward_mean" in metrics.names else ("train/loss", *_FIRST)
    by_theme: dict[str, list[str]] = {theme: [] for theme in _THEMES}
    for panel in panels(metrics):
        by_theme[panel.theme] += [name for name in panel.metrics if name not in first and not name.startswith("eval/")]
    blocks = {"": [_row(metrics, name) for name in first if name in metrics.names]}
    blocks[""] = [*(_held_out(metrics, name) for name in eval_set_names(metrics.names)), *blocks[""]]
    constant: list[str] = []
    for theme, names in by_theme.items():
        rows = [(name, _row(metrics, name)) for name in names]
        blocks[theme] = [row for name, row in rows if not _is_constant(metrics, name)]
        constant += [f"{row.name} {row.change.removesuffix(' throughout')}" for name, row in rows
                     if _is_constant(metrics, name)]  # fmt: skip
    yield from _table(blocks)
    if constant:
        yield ""
        yield from hanging("did not change: ", ", ".join(constant))
    yield from _origin(folder)


def _state(folder: RunFolder, gone: RunProgress) -> Iterator[Line]:
    left = "" if gone.left_s is None else f", {duration(gone.left_s)} left"
    state = f"{gone.state}, {gone.steps}{left}"
    style = "bold red" if gone.ended_early or gone.state == "silent" else "bold"
    if len(state) + len(str(folder.path)) + 2 <= terminal_width():
        yield [(state, style), f"  {folder.path}"]
    else:
        yield [(state, style)]
        yield str(folder.path)


def _judged(folder: RunFolder, judged: Verdict) -> Iterator[Line]:
    yield [(judged.title, _STYLES.get(judged.state, "bold yellow"))]
    for reason in judged.reasons:
        yield from hanging("    ", reason)
    if judged.command:
        yield [("    " + judged.command, "cyan")]
        yield from hanging("    ", judged.command_note)
    if judged.alerts and judged.state != LOOK:
        yield [(f"Worth a look: {len(judged.alerts)}", "bold yellow")]
    for alert in judged.alerts:
        yield from ([(line, "yellow")] for line in hanging("  ! ", alert.text))
        yield from hanging("    ", alert.advice)
        if alert.filter:
            yield [("    " + shlex.join(["slime", "show", str(folder.path), "--where", alert.filter]), "cyan")]


def _counts(folder: RunFolder) -> Counts | None:
    """What the samples of a small run show; larger ones would have to be indexed first."""
    files = [file for file in folder.sample_files() if file.kind == "train"]
    try:
        if sum(file.path.stat().st_size for file in files) > _READ_BYTES:
            return None
    except OSError:
        return None
    with closing(RunIndex(folder, None, files, words=False)) as index:
        index.refresh()
        return queries.counts(index)


def _is_constant(metrics: Metrics, name: str) -> bool:
    values = metrics.series(name)[1]
    return len(values) > 1 and min(values) == max(values)


def _row(metrics: Metrics, name: str) -> _Row:
    called, values = words(name), metrics.series(name)[1]
    if not values:
        return _Row(called.title, "no finite value", values, True)
    change = Change.of(values)
    return _Row(called.title, change.text(called), values, bool(change.clear), called.unit == "%")


def _held_out(metrics: Metrics, name: str) -> _Row:
    steps, values = metrics.series(f"eval/{name}")
    if not values:
        return _Row(f"held out: {name}", "no finite value", values, True)
    ends = [metrics.rows[steps[-1]].get(f"eval/{name}/{end}") for end in ("low", "high")]
    within = "" if None in ends else f"95 %: {number(ends[0])} to {number(ends[1])}, "
    first = f"{number(values[0])} -> " if len(values) > 1 else ""
    return _Row(f"held out: {name}", f"{first}{number(values[-1])}", values, True, note=f"{within}step {steps[-1]}")


def _table(blocks: dict[str, list[_Row]]) -> Iterator[Line]:
    """The rows of all blocks, below their titles, in the same columns."""
    rows = [row for block in blocks.values() for row in block]
    names = max((len(row.name) for row in rows if len(row.name) <= _NAME), default=0)
    changes = max((len(row.change) for row in rows), default=0)
    width = terminal_width()
    room = min(_CURVE, (_PIPE if width >= UNLIMITED else width) - names - changes - 6)
    for title, block in blocks.items():
        if block:
            yield ""
        if block and title:
            yield [(title, "bold")]
        for row in block:
            if len(row.name) > names:
                yield f"  {row.name}"
            beside = f"  {row.note}" if row.note else ""
            curve = (
                sparkline(row.values, room - len(beside), share=row.share) if room >= _SHORTEST + len(beside) else ""
            )
            name = row.name if len(row.name) <= names else ""
            of_change, of_curve = ("bold", "cyan") if row.clear else ("", "dim")
            cells = [(f"{row.change:<{changes if curve else 0}}", of_change), (f"  {curve}" if curve else "", of_curve)]
            yield [f"  {name:<{names}}  ", *cells, beside]


def _origin(folder: RunFolder) -> Iterator[Line]:
    """What the run is made of, what its log says, and how to repeat it."""
    used = folder.plugins().get("used", {})
    parts = [
        (slot, used[slot])
        for slot in ("estimator", "reward", "generator", "datasource")
        if isinstance(used, dict) and isinstance(used.get(slot), dict)
    ]
    if parts:
        yield ""
        yield [("components", "bold")]
    for slot, part in parts:
        yield f"  {slot:<12}{part.get('id')}  ({part.get('distribution')} {part.get('version')})"
    if events := folder.events():
        yield ""
        of = f", the last {_EVENTS} of {len(events)}" if len(events) > _EVENTS else ""
        yield [(f"log: warnings and errors{of}", "bold")]
        for event in events[-_EVENTS:]:
            yield from hanging(f"  {event.time} {event.level}: ", event.text)
    for problem in folder.problems():
        yield from ([(line, "yellow")] for line in hanging("left out: ", problem))
    yield ""
    yield ["again: ", (folder.command(), "cyan")]
