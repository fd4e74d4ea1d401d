"""A run, or some of its samples, as one HTML file that needs no server: `report.html`, and exports of the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from slime.errors import DataError, writing
from slime.plugin.watchers import BuildPanel
from slime_viewer import queries
from slime_viewer.answers import run_answer, series_answer, whole_samples
from slime_viewer.filters import Condition, read_filter
from slime_viewer.index import RunIndex
from slime_viewer.lines import dumped
from slime_viewer.page import static_page
from slime_viewer.plugin_panels import PanelBoard
from slime_viewer.run_files import RunFolder, SampleFile

REPORT = "report.html"
#: samples of an export
MAX_EXPORTED = 500
#: best and worst groups of a report, of the last rollouts and of the last evaluation; how many rollouts these are, and
#: bytes of samples that are read
_GROUPS, _LAST, _BYTES = 4, 5, 16 * 2**20
#: a path from the root on, of which the last name is kept
_PATH = re.compile(r"""(?<![\w.…/:-])/(?:[^\s'"/,;:]+/)+([^\s'"/,;:]+)""")
#: bytes of numbers of tokens in a file
_TOKEN_BYTES = 8 * 2**20
#: characters of each text in a file
_MAX_TEXT = 5000
#: steps that a file's curves have; longer ones are thinned
_STEPS = 2000


def write_report_page(run_dir: Path, outcome: str, build: BuildPanel | None = None) -> None:
    """Write `report.html` of a run that has just ended.

    It reads the metrics and the newest samples only, so that it takes a moment.

    Args:
        run_dir: The run folder.
        outcome: "finished", "interrupted" or "failed".
        build: Builds the panels of plugins that the run's configuration names.

    Raises:
        DataError: The folder is gone.
        OSError: The file cannot be written.
    """
    folder = RunFolder(run_dir)
    folder.metrics.refresh()
    with closing(RunIndex(folder, None, _last_files(folder), words=False)) as index:
        best_and_worst = _best_and_worst(index)
        drawn = PanelBoard(folder, index, build=build).drawn()
        page = _page(index, *best_and_worst, f"Everything else: slime view {run_dir}", drawn, outcome)
    path = run_dir / REPORT
    partial = path.with_suffix(".partial")
    try:
        with writing(path):
            partial.write_text(page, encoding="utf-8")
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _last_files(folder: RunFolder) -> list[SampleFile]:
    """The samples of the last rollouts and of the last evaluation, the newest first."""
    files = list(folder.sample_files())
    train = [file for file in files if file.kind == "train"][-_LAST:][::-1]
    held_out = [file for file in files if file.kind == "eval"]
    last = [file for file in held_out if file.step == held_out[-1].step]
    return [*train[:1], *last, *train[1:]]


def _best_and_worst(index: RunIndex) -> tuple[list[queries.Found], str]:
    """The samples of the best and worst groups of the last rollouts and of the last evaluation, and what they are."""
    index.refresh(lambda: index.bytes_read >= _BYTES)
    state = index.state()
    # Reading may have ended within a group, whose mean is then unknown.
    newest = "(SELECT samples.file, samples.grp FROM samples ORDER BY samples.id DESC LIMIT 1)"
    whole = Condition() if state.done >= state.total else Condition(f"(samples.file, grp) IS NOT {newest}")
    found, told = [], []
    for kind, what in (("train", "rollouts {} to {}"), ("eval", "the evaluation after {} rollouts")):
        best, worst = queries.extreme_groups(index, whole & Condition("kind = ?", (kind,)), _GROUPS)
        if best:
            found += [sample for key in (*best, *worst) for sample in queries.group(index, key)[0]]
            told.append(what.format(*index.query("SELECT min(step), max(step) FROM samples WHERE kind = ?", [kind])[0]))
    if not found:
        return [], "No group with rewards."
    some = "" if state.done >= state.total else f", of which the newest {state.done / 2**20:.0f} MiB were read"
    return found, f"The groups with the highest and the lowest mean reward of {' and of '.join(told)}{some}."


def export_page(index: RunIndex, line: str, sort: str, drawn: Sequence[dict[str, Any]] = ()) -> str:
    """The samples that a filter line finds, with the run's curves and what panels have drawn. Raises `DataError`."""
    condition = read_filter(line)
    found = queries.find(index, condition, sort=sort, limit=MAX_EXPORTED)
    return _page(index, found, f"{queries.count(index, condition)} samples of the run fit: {line or 'all'}.", "", drawn)


def _page(
    index: RunIndex,
    found: Sequence[queries.Found],
    note: str,
    more: str,
    drawn: Sequence[dict[str, Any]],
    outcome: str | None = None,
) -> str:
    folder = index.folder
    run = run_answer(folder, index.state(), "", counts=queries.counts(index), outcome=outcome)
    samples = whole_samples(found, _MAX_TEXT)
    groups = {str(one["group_key"]) for one in samples}
    content = {
        "run": _without_places(run, folder),
        "series": _thinned(series_answer(folder.metrics, folder.metrics.names)),
        "panels": list(drawn),
        "samples": samples,
        "tokens": _tokens(found[: len(samples)]),
        "scales": queries.token_scales(index),
        # Of each group, how many samples it has in the run: some of them may not be here.
        "sizes": {key: queries.count(index, queries.of_group(key)) for key in groups},
        "note": _without_places(f"{note} {len(samples)} samples are in this file. {more}".strip(), folder),
    }
    return static_page(f"{folder.name} · slime", content)


def _without_places(told: Any, folder: RunFolder) -> Any:
    """What a file says of a run, which may be sent to somebody: it names the folders of no machine.

    The run folder is called `outputs/NAME`, and of other paths the last name is kept.
    """
    if isinstance(told, str):
        short = f"{folder.path.resolve().parent.name}/{folder.name}"
        for place in {str(folder.path.resolve()), str(folder.path)}:
            told = re.sub(rf"{re.escape(place)}(?![\w.-])", lambda _: short, told) if len(place) > 1 else told
        return _PATH.sub(r"…/\1", told)
    if isinstance(told, dict):
        return {name: _without_places(one, folder) for name, one in told.items()}
    return [_without_places(one, folder) for one in told] if isinstance(told, list | tuple) else told


def _tokens(found: Sequence[queries.Found]) -> dict[str, Any]:
    """The numbers of the samples' tokens, as many as there is room for; of damaged files none."""
    told: dict[str, Any] = {}
    room = _TOKEN_BYTES
    for one in found:
        with suppress(DataError):
            if (tokens := one.tokens()) is not None:
                room -= len(dumped(tokens))
                if room < 0:
                    break
                told[one.key] = tokens
    return told


def _thinned(series: dict[str, Any]) -> dict[str, Any]:
    """Every n-th step; and of the steps of evaluations, which are few, every n-th too."""
    steps, values = series["steps"], series["values"]
    if len(steps) <= _STEPS:
        return series
    evaluations = [column for name, column in values.items() if name.startswith("eval/")]
    evaluated = [number for number in range(len(steps)) if any(column[number] is not None for column in evaluations)]
    every, every_evaluation = -(-len(steps) // _STEPS), max(1, -(-len(evaluated) // _STEPS))
    kept = sorted({*range(0, len(steps), every), *evaluated[::every_evaluation]})
    return {
        "steps": [steps[number] for number in kept],
        **{
            part: {name: [column[number] for number in kept] for name, column in series[part].items()}
            for part in ("values", "axes")
        },
    }
