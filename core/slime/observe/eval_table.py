"""An evaluation as a table: one line a set."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.text import Text

from slime.observe.step_line import count, number, percent

_GAP = "  "
_PASS = re.compile(r"pass@(\d+)")


@dataclass(frozen=True)
class _Column:
    title: str
    cells: list[Text]
    #: columns of a higher rank go first where there is no room
    rank: int = 0

    @property
    def width(self) -> int:
        return max(len(self.title), *(cell.cell_len for cell in self.cells))


def set_names(metrics: Mapping[str, float]) -> list[str]:
    """The sets that `eval/NAME` metrics are of."""
    return [tag.removeprefix("eval/") for tag in metrics if tag.startswith("eval/") and tag.count("/") == 1]


def eval_table(metrics: Mapping[str, float], first: Mapping[str, float], width: int) -> list[Text]:
    """Header and lines of the sets in `metrics`, at most `width` characters wide.

    `first`: mean rewards, by tag, that a later evaluation is compared with.
    """
    names = set_names(metrics)
    columns = _columns(names, metrics, first)
    while len(columns) > 2 and sum(column.width + len(_GAP) for column in columns) > width:
        columns.remove(max(reversed(columns), key=lambda column: column.rank))
    header = _GAP.join(
        column.title.ljust(column.width) if i == 0 else column.title.rjust(column.width)
        for i, column in enumerate(columns)
    )
    lines = [Text(_GAP + header, style="bold dim")]
    for row in range(len(names)):
        line = Text(_GAP)
        for i, column in enumerate(columns):
            cell = column.cells[row].copy()
            room = " " * (column.width - cell.cell_len)
            line.append_text(Text(_GAP if i else "")).append_text(
                cell.append(room) if i == 0 else Text(room).append_text(cell)
            )
        lines.append(line)
    return lines


def _columns(names: list[str], metrics: Mapping[str, float], first: Mapping[str, float]) -> list[_Column]:
    def cells(key: str, show: Callable[[float], str], style: str = "", missing: str = "·") -> list[Text]:
        values = [metrics.get(f"eval/{name}{key}") for name in names]
        return [Text(missing, style="dim") if value is None else Text(show(value), style=style) for value in values]

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
