"""`metrics.jsonl`: one JSON object per line, every number of every step."""

from __future__ import annotations

import logging
import math
import time
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from slime.errors import writing

FILE_NAME = "metrics.jsonl"

logger = logging.getLogger(__name__)


def eval_set_names(metrics: Iterable[str]) -> list[str]:
    """Names of the evaluation sets among the names of metrics: `eval/NAME` is the mean reward of a set."""
    return [name.removeprefix("eval/") for name in metrics if name.startswith("eval/") and name.count("/") == 1]


def finite_or_none(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """`metrics` as plain floats, with None for values that are not finite.

    Raises:
        TypeError: A value is not a number; the message names the metric.
    """
    clean: dict[str, float | None] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"metric {name!r} is {value!r}, expected a number") from None
        clean[name] = number if math.isfinite(number) else None
    return clean


class MetricsWriter:
    """Appends one line per call to `RUN_DIR/metrics.jsonl` and flushes it.

    JSON has no NaN or infinity: such a value is written as null, and a warning names the metric.
    """

    def __init__(self, run_dir: Path) -> None:
        """Open the file for appending, so that a resumed run continues it. Raises `OSError`."""
        self.path = run_dir / FILE_NAME
        self._file = self.path.open("ab")
        if self._ends_inside_a_line():
            self._file.write(b"\n")

    def _ends_inside_a_line(self) -> bool:
        """Whether an earlier run was killed in the middle of a write."""
        if self.path.stat().st_size == 0:
            return False
        with self.path.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) != b"\n"

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the numbers of one step."""
        clean = finite_or_none(metrics)
        bad = [name for name, value in clean.items() if value is None]
        if bad:
            logger.warning("step %d: not finite, written as null: %s", step, ", ".join(bad))
        self.append({"step": step, "unix_time": round(time.time(), 3), **clean})

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a complete row. Raises `DiskFullError`."""
        with writing(self.path):
            self._file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def earlier_metrics(checkpoint: Path, run_dir: Path, done: int) -> list[dict[str, Any]]:
    """The rows of the run that saved a checkpoint after `done` rollouts, up to then: what comes before its curve.

    None if the run in `run_dir` has rows already: it continues in the same folder.
    """
    saved = tomllib.loads((checkpoint / "config.toml").read_text(encoding="utf-8")).get("run", {})
    folders = [Path(saved.get("output_dir", "outputs")) / str(saved.get("run_name", "")), checkpoint.parent.parent]
    earlier = next((folder for folder in folders if (folder / FILE_NAME).is_file()), None)
    if earlier is None or (run_dir / FILE_NAME).stat().st_size:
        return []
    # The evaluation after the last of these rollouts has their number as its step.
    rows = [row for row in read_metrics(earlier) if row["step"] <= done]
    return [
        row
        if row["step"] < done
        else {name: value for name, value in row.items() if name.startswith("eval/") or "/" not in name}
        for row in rows
    ]


def depends_on_time(name: str) -> bool:
    """Whether a metric depends on how long something took, or on which memory the system gave, so that it differs
    between runs that are otherwise equal."""
    ends = ("_per_s", "/seconds_mean", "unix_time", "rollout/ready")
    return name.startswith(("time/", "memory/")) or name.endswith(ends)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of `RUN_DIR/metrics.jsonl`, one per step, ascending.

    Rows of one step are merged; if a resumed run repeated a step, the later values win. A line cut short when a run was
    killed is skipped.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for line in (run_dir / FILE_NAME).read_bytes().splitlines():
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        by_step.setdefault(row["step"], {}).update(row)
    return [by_step[step] for step in sorted(by_step)]
