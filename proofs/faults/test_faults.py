"""Some of the faults of `make faults`, with limits that hold on a busy machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proofs.faults.__main__ import PAGE, table_with
from proofs.faults.measure import Outcome, measure
from proofs.faults.table import DEAD_S, FAULTS, HUNG_S, Fault
from proofs.faults.target import Bench

#: how many times longer than promised a fault may stay unnoticed here, where other tests compute too
SLACK = 3.0
CORE = [fault for fault in FAULTS if fault.core]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """What the runs share."""
    return Bench.make(tmp_path_factory.mktemp("bench"))


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize("fault", CORE, ids=lambda fault: f"{fault.name} while {fault.phase}")
def test_the_part_at_fault_is_named_in_time_and_nothing_is_left(fault: Fault, bench: Bench, tmp_path: Path) -> None:
    outcome = measure(fault, bench, tmp_path / "run", slack=SLACK)
    assert outcome.problems == [], outcome.output


def test_a_death_and_a_hang_are_tried_here() -> None:
    assert {fault.within_s for fault in CORE} == {DEAD_S, HUNG_S} and len(CORE) == 2


def test_a_fault_is_one_row_of_the_page_and_measured_again_it_replaces_the_row() -> None:
    fault = CORE[0]

    def outcome(seconds: float) -> Outcome:
        message = "slime: error: trainer rank 1 (pid 77 on here) has ended | see /tmp/slime-faults-x/0/outputs/run"
        return Outcome(fault, seconds, seconds, 1, message, [], "")

    page = PAGE.read_text(encoding="utf-8")
    once = table_with(page, [outcome(1.25)])
    twice = table_with(once, [outcome(2.5)])
    key = f"| {fault.name} | {fault.phase} |"
    assert f"{key} 1.2 s |" in once and f"{key} 2.5 s |" in twice
    assert "(pid N on HOST) has ended \\| see …" in twice
    assert twice.count(key) == 1


def test_the_rows_of_the_page_are_those_of_the_table() -> None:
    measured = PAGE.read_text(encoding="utf-8").partition("measured: begin")[2].partition("measured: end")[0]
    known = {f"| {fault.name} | {fault.phase} |" for fault in FAULTS}
    rows = [line for line in measured.splitlines() if line.startswith("| ") and "found after" not in line]
    rows = [line for line in rows if not line.startswith("| ---")]
    assert {" | ".join(row.split(" | ")[:2]) + " |" for row in rows} == known
    assert [row for row in rows if not re.fullmatch(r"\d+\.\d s", row.split(" | ")[2])] == [], "not all were found"
