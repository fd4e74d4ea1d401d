"""`results.json`: what an evaluation found, for programs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from slime.config.eval_sets import EvalSetSettings
from slime.observe.metrics import finite_or_none

FILE_NAME = "results.json"


def write_results(
    run_dir: Path,
    sets: Sequence[EvalSetSettings],
    metrics: Mapping[str, float],
    files: Mapping[str, Path],
    **more: Any,
) -> Path:
    """Write `RUN_DIR/results.json` and return its path.  Raises `OSError`.

    `files`: where each set's samples are.  `more` stands beside the sets.
    """
    content = {**more, "sets": [_set(one, finite_or_none(metrics), files[one.name]) for one in sets]}
    path = run_dir / FILE_NAME
    partial = path.with_suffix(".partial")
    partial.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE, default=str))
    os.replace(partial, path)
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
    """A number with its 95 % interval, which is null where there is none."""
    return {"value": metrics[name], "low": metrics.get(f"{name}/low"), "high": metrics.get(f"{name}/high")}
