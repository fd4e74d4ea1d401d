"""The metrics file."""

from __future__ import annotations

import json
import logging
import math
from contextlib import closing
from pathlib import Path

import pytest

from slime.observe.metrics import MetricsWriter, read_metrics


def test_every_step_is_one_json_line_that_is_flushed_at_once(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(0, {"train/loss": 0.5})
        writer.write(1, {"train/loss": 0.25, "rollout/failed": 3})
        rows = [json.loads(line) for line in writer.path.read_text().splitlines()]
    assert [(row["step"], row["train/loss"]) for row in rows] == [(0, 0.5), (1, 0.25)]
    assert rows[1]["rollout/failed"] == 3.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_null_with_a_warning(
    tmp_path: Path, bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), closing(MetricsWriter(tmp_path)) as writer:
        writer.write(7, {"train/loss": bad, "train/kl": 0.0})
    [row] = read_metrics(tmp_path)
    assert (row["train/loss"], row["train/kl"]) == (None, 0.0)
    assert "step 7: not finite, written as null: train/loss" in caplog.text


def test_a_value_that_is_not_a_number_is_refused_with_its_name(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as writer, pytest.raises(TypeError, match="metric 'train/loss' is 'high'"):
        writer.write(0, {"train/loss": "high"})


def test_rows_of_one_step_are_merged_and_a_repeated_step_counts_once(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(0, {"eval/held": 0.25})
        writer.write(0, {"train/loss": 1.0})
        writer.write(1, {"train/loss": 2.0})
    with closing(MetricsWriter(tmp_path)) as resumed:
        resumed.write(1, {"train/loss": 3.0})
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["train/loss"]) for row in rows] == [(0, 1.0), (1, 3.0)]
    assert rows[0]["eval/held"] == 0.25


def test_an_incomplete_last_line_of_a_killed_run_is_skipped(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(0, {"train/loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "train/lo')
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(2, {"train/loss": 2.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 2]
