"""The results of an evaluation: a table for the terminal, and `results.json`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.text import Text

from slime.config.eval_sets import EvalSetSettings
from slime.observe.metrics import eval_set_names, finite_or_none
from slime.observe.samples import write_whole
from slime.observe.step_line import GAP, count, fit, number, percent

_PASS = re.compile(r"pass@(\d+)")


@dataclass(frozen=True)
class _Column:
    title: str
    cells: list[Text]
    #: a narrow terminal drops the highest ranks first
    rank: int = 0

    @property
    def width(self) -> int:
        return max(len(self.title), *(cell.cell_len for cell in self.cells))


def eval_table(metrics: Mapping[str, float], first: Mapping[str, float], width: int) -> list[Text]:
    """A header, and one line for each evaluation set.

    Args:
        metrics: `eval/NAME`, the mean reward of a set, with its details `eval/NAME/...`.
        first: Mean rewards of the first evaluation, for the column with the change.
        width: Width of the terminal, in characters; a narrow one gets fewer columns.
    """
    columns = _columns(eval_set_names(metrics), metrics, first)
    columns = [columns[index] for index in fit([(column.rank, column.width) for column in columns], width)]
    header = _row(columns, [Text(column.title, style="bold dim") for column in columns])
    return [header, *(_row(columns, cells) for cells in zip(*(column.cells for column in columns), strict=True))]


def _row(columns: Sequence[_Column], cells: Sequence[Text]) -> Text:
    padded = [cell.copy() for cell in cells]
    for position, (column, cell) in enumerate(zip(columns, padded, strict=True)):
        cell.align("right" if position else "left", column.width)
    return Text(GAP).append_text(Text(GAP).join(padded))


def _columns(names: list[str], metrics: Mapping[str, float], first: Mapping[str, float]) -> list[_Column]:
    def cells(key: str, show: Callable[[float], str], style: str = "") -> list[Text]:
        values = [metrics.get(f"eval/{name}{key}") for name in names]
        return [Text("·", style="dim") if value is None else Text(show(value), style=style) for value in values]

    attempts = {metrics.get(f"eval/{name}/attempts") for name in names}
    [n] = attempts if len(attempts) == 1 else [None]
    ks = sorted({int(match[1]) for name in metrics if (match := _PASS.fullmatch(name.rpartition("/")[2]))})
    columns = [
        _Column("set", [Text(name, style="bold") for name in names]),
        _Column("mean" if n is None else f"mean@{n:.0f}", cells("", number, "bold magenta")),
        _Column("change", [_change(metrics, first, f"eval/{name}") for name in names], 2),
        _Column("95% interval", [_interval(metrics, f"eval/{name}") for name in names], 1),
        *(_Column(f"pass@{k}", cells(f"/pass@{k}", number, "cyan"), 3 if k in (1, ks[-1]) else 9) for k in ks),
        _Column("samples", cells("/samples", lambda value: f"{value:.0f}"), 4),
        _Column("length", cells("/response_length_mean", count), 5),
        _Column("cut", cells("/truncated_ratio", percent), 4),
        _Column("lost", [_lost(metrics, f"eval/{name}") for name in names], 4),
    ]
    return [column for column in columns if any(cell.plain != "·" for cell in column.cells)]


def _interval(metrics: Mapping[str, float], tag: str) -> Text:
    low, high = metrics.get(f"{tag}/low"), metrics.get(f"{tag}/high")
    return Text("·", style="dim") if low is None or high is None else Text(f"{number(low)} to {number(high)}")


def _change(metrics: Mapping[str, float], first: Mapping[str, float], tag: str) -> Text:
    change = metrics[tag] - first.get(tag, metrics[tag])
    return Text(f"{change:+.4f}", style="green" if change > 0 else "red") if change else Text("·", style="dim")


def _lost(metrics: Mapping[str, float], tag: str) -> Text:
    lost = sum(metrics.get(f"{tag}/{how}", 0.0) for how in ("failed", "aborted", "unscored"))
    return Text(f"{lost:.0f}", style="bold red") if lost else Text("·", style="dim")


FILE_NAME = "results.json"


def write_results(
    run_dir: Path,
    sets: Sequence[EvalSetSettings],
    metrics: Mapping[str, float],
    files: Mapping[str, Path],
    **more: Any,
) -> Path:
    """Write `RUN_DIR/results.json`.

    Args:
        run_dir: The run folder.
        sets: The evaluation sets, with the settings they were scored with.
        metrics: `eval/NAME` and `eval/NAME/...` of each set.
        files: The file with the samples of each set, by name.
        **more: Further entries of the file, beside the sets.

    Returns:
        The path of the file.

    Raises:
        OSError: The file cannot be written.
    """
    content = {**more, "sets": [_set(one, finite_or_none(metrics), files[one.name]) for one in sets]}
    path = run_dir / FILE_NAME
    write_whole(path, orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE, default=str))
    return path


def _set(one: EvalSetSettings, metrics: Mapping[str, float | None], file: Path) -> dict[str, Any]:
    tag = f"eval/{one.name}"
    settings = asdict(one)
    return {
        "name": settings.pop("name"),
        "path": settings.pop("path"),
        "mean_reward": _estimate(tag, metrics),
        "pass_at_k": {str(k): _estimate(f"{tag}/pass@{k}", metrics) for k in one.pass_k},
        "metrics": {
            name.removeprefix(f"{tag}/"): value for name, value in metrics.items() if name.startswith(f"{tag}/")
        },
        "settings": {key: value for key, value in settings.items() if key != "where"},
        "samples": str(file),
    }


def _estimate(name: str, metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """A number and its 95 % confidence interval; null if the interval is unknown."""
    return {"value": metrics[name], "low": metrics.get(f"{name}/low"), "high": metrics.get(f"{name}/high")}
