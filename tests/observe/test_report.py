"""Pictures of a run."""

from __future__ import annotations

import struct
from contextlib import closing
from pathlib import Path

import pytest

from slime.observe.metrics import MetricsWriter
from slime.observe.report import restarts, smoothed, write_report


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_a_run_with_rewards_gets_both_pictures(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(0, {"eval/held": 0.25})
        for step in range(8):
            writer.write(step, {"rollout/reward_mean": step / 8, "time/step": 2.0, "time/train": 1.0})
        writer.write(8, {"eval/held": 0.75, "rollout/reward_mean": float("nan")})
    write_report(tmp_path)
    assert png_size(tmp_path / "reward_curve.png") == png_size(tmp_path / "phases.png") == (1170, 650)


def test_steps_with_restarts_are_marked(tmp_path: Path) -> None:
    rows = [{"step": 0}, {"step": 1, "restarts/engine": 2.0}, {"step": 2, "restarts/seconds": 1.0}, {"step": 3}]
    assert restarts([*rows, {"step": 4, "restarts/router": 1.0}]) == [1, 4]
    with closing(MetricsWriter(tmp_path)) as writer:
        for row in rows:
            writer.write(row.pop("step"), {**row, "time/step": 1.0})
    write_report(tmp_path)
    assert png_size(tmp_path / "phases.png") == (1170, 650)


def test_a_run_without_numbers_gets_no_picture(tmp_path: Path) -> None:
    write_report(tmp_path)
    MetricsWriter(tmp_path).close()
    write_report(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_smoothing_does_not_start_at_zero_and_follows_a_constant() -> None:
    assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert smoothed([0.0, 1.0], share=0.5) == pytest.approx([0.0, 2 / 3])
