"""Rollouts as files a person can read: one line per sample, in group order."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from slime.types import Group, Sample

FOLDER = "rollouts"


def sample_row(sample: Sample) -> dict[str, Any]:
    """What a reader wants to know about one sample; token ids and log-probs are left out.

    `trained_tokens` counts the ones of its mask.  `messages` is there for conversations, `metrics` where the generator
    reports some.
    """
    row = {
        "group": sample.group_index,
        "index": sample.index,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.reward,
        "status": sample.status.value,
        "finish_reason": sample.finish_reason,
        "prompt_tokens": sample.prompt_length,
        "response_tokens": sample.response_length,
        "trained_tokens": sample.response_length if sample.loss_mask is None else sum(sample.loss_mask),
        "weight_versions": sample.weight_versions,
        "failure": sample.failure,
    }
    if "messages" in sample.metadata:
        row["messages"] = sample.metadata["messages"]
    if sample.metrics:
        row["metrics"] = sample.metrics
    return row


def write_rollout(run_dir: Path, rollout: int, groups: Sequence[Group]) -> Path:
    """Write `RUN_DIR/rollouts/000012.jsonl` and return its path.  Raises `OSError`."""
    return _write(run_dir / FOLDER / f"{rollout:06d}.jsonl", (sample for group in groups for sample in group.samples))


def write_dropped(run_dir: Path, rollout: int, dropped: Sequence[tuple[Group, str]]) -> Path:
    """Write `RUN_DIR/rollouts/dropped_000012.jsonl`, each sample with the reason.  Raises `OSError`."""
    rows = ({**sample_row(sample), "dropped": reason} for group, reason in dropped for sample in group.samples)
    return _write_rows(run_dir / FOLDER / f"dropped_{rollout:06d}.jsonl", rows)


def write_eval(run_dir: Path, rollout: int, name: str, samples: Iterable[tuple[Sample, Mapping[str, Any]]]) -> Path:
    """Write `RUN_DIR/rollouts/eval_NAME_000012.jsonl` and return its path.  Raises `OSError`.

    Each sample comes with what more there is to say of it.
    """
    rows = ({**sample_row(sample), **more} for sample, more in samples)
    return _write_rows(run_dir / FOLDER / f"eval_{name}_{rollout:06d}.jsonl", rows)


def write_failed(run_dir: Path, name: str, samples: Iterable[Sample]) -> Path:
    """Write `RUN_DIR/rollouts/failed_NAME.jsonl` and return its path.  Raises `OSError`."""
    return _write(run_dir / FOLDER / f"failed_{name}.jsonl", samples)


def _write(path: Path, samples: Iterable[Sample]) -> Path:
    return _write_rows(path, map(sample_row, samples))


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    lines = [_dump(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(b"".join(lines))
    os.replace(partial, path)
    return path


def _dump(row: dict[str, Any]) -> bytes:
    options = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(row, option=options, default=str)
    except orjson.JSONEncodeError:
        # A lone surrogate in a response is no valid UTF-8, and an int may exceed 64 bits.
        readable = {name: _without_surrogates(value) for name, value in row.items()}
        return orjson.dumps(readable, option=options, default=str)


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    return value if isinstance(value, int | float | None) else _without_surrogates(repr(value))
