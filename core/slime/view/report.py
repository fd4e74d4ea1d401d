"""A run, or some of its samples, as one HTML file that needs no server: `report.html`, and exports of the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.errors import writing
from slime.view import queries
from slime.view.answers import run_answer, series_answer
from slime.view.filters import read_filter
from slime.view.index import RunIndex
from slime.view.page import static_page
from slime.view.run_files import RunFolder, SampleFile

REPORT = "report.html"
#: samples of an export
MAX_EXPORTED = 500
#: best and worst groups of a report, and the bytes of the newest sample files that they are looked for in
_GROUPS, _BYTES = 4, 16 * 2**20
#: characters of each text in a file
_MAX_TEXT = 5000
#: steps that a file's curves have; longer ones are thinned
_STEPS = 2000


def write_report_page(run_dir: Path, outcome: str) -> None:
    """Write `report.html` of a run that has just ended.

    It reads the metrics and the newest samples only, so that it takes a moment.

    Args:
        run_dir: The run folder.
        outcome: "finished", "interrupted" or "failed".

    Raises:
        DataError: The folder is gone.
        OSError: The file cannot be written.
    """
    folder = RunFolder(run_dir)
    folder.metrics.refresh()
    files = _newest(folder)
    index = RunIndex(folder, None, files)
    index.refresh()
    best, worst = queries.extreme_groups(index, read_filter("kind:train"), _GROUPS)
    found = [sample for key in (*best, *worst) for sample in queries.group(index, key)]
    note = f"The groups with the highest and the lowest mean reward in the last {len(files)} rollouts."
    page = _page(index, found, f"{note} Everything else: slime view {run_dir}", outcome)
    path = run_dir / REPORT
    partial = path.with_suffix(".partial")
    with writing(path):
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)


def export_page(index: RunIndex, line: str, sort: str) -> str:
    """The samples that a filter line finds, with the run's curves. Raises `DataError`."""
    condition = read_filter(line)
    total = queries.count(index, condition)
    found = queries.find(index, condition, sort=sort, limit=MAX_EXPORTED)
    some = f"{len(found)} of {total} samples" if total > len(found) else f"{total} samples"
    return _page(index, found, f"{some} of {index.folder.path} that fit: {line or 'all'}")


def _page(index: RunIndex, found: Sequence[queries.Found], note: str, outcome: str | None = None) -> str:
    folder = index.folder
    run = run_answer(folder, index.state(), "")
    if outcome is not None:
        run["state"] = outcome
    series = _thinned(series_answer(folder.metrics, folder.metrics.names))
    samples = [one.whole(_MAX_TEXT) for one in found]
    return static_page(f"{folder.name} · slime", {"run": run, "series": series, "samples": samples, "note": note})


def _thinned(series: dict[str, Any]) -> dict[str, Any]:
    """Every n-th step, and those of evaluations, which are few."""
    every = -(-len(series["steps"]) // _STEPS)
    if every <= 1:
        return series
    evaluations = [values for name, values in series["values"].items() if name.startswith("eval/")]
    kept = [
        number
        for number in range(len(series["steps"]))
        if number % every == 0 or any(values[number] is not None for values in evaluations)
    ]
    return {
        "steps": [series["steps"][number] for number in kept],
        "values": {name: [values[number] for number in kept] for name, values in series["values"].items()},
    }


def _newest(folder: RunFolder) -> list[SampleFile]:
    """The newest files of training samples, of `_BYTES` bytes in all; at least one, unless it is larger alone."""
    kept: list[SampleFile] = []
    room = _BYTES
    for file in reversed([file for file in folder.sample_files() if file.kind == "train"]):
        try:
            room -= file.path.stat().st_size
        except OSError:
            continue
        if room < 0:
            break
        kept.insert(0, file)
    return kept
