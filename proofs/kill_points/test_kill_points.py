"""The parts of `make kill-points` that need no run: `tests/integration/test_runs.py` kills and continues two."""

from __future__ import annotations

import re
from collections import Counter

from proofs.kill_points.__main__ import BEGIN, END, PAGE, with_table
from proofs.kill_points.points import ASYNCHRONOUS, SYNCHRONOUS, Outcome, points
from proofs.kill_points.target import DELETING, EVALUATION, START, SYNC, TRAIN, WRITING


def test_twenty_points_meet_every_phase_of_both_loops() -> None:
    chosen = points()
    assert len(chosen) == len({point.number for point in chosen}) == 20
    counts = Counter((point.mode, point.phase) for point in chosen)
    phases = (START, TRAIN, SYNC, EVALUATION, WRITING, DELETING)
    assert all(counts[mode, phase] for mode in (SYNCHRONOUS, ASYNCHRONOUS) for phase in phases)
    assert {point.async_save for point in chosen if point.phase == WRITING} == {False, True}
    assert any(point.twice for point in chosen)


def test_the_table_replaces_the_one_before() -> None:
    [first, *_] = points()
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = with_table(page, [Outcome(first, ["start-up", "training"], [0, 2], True)])
    assert "| synchronous | start-up, then training | 0, 2 | yes |" in once and "old" not in once
    assert once.startswith("before\n") and once.endswith(f"{END}\nafter\n")
    again = with_table(once, [Outcome(first, ["training"], [1], True, ["metrics.jsonl: step 3: train/loss"])])
    assert "| synchronous | training | 1 | no |" in again and "start-up" not in again


def test_every_point_of_the_page_ended_equal() -> None:
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [line for line in table.splitlines() if re.match(r"\| (synchronous|--async)", line)]
    assert len(rows) == len(points())
    assert all(row.endswith("| yes |") for row in rows)
