"""docs/support.md is current, and the tests that it names exist."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.gpu_proof.__main__ import PARTS as PROOF
from benchmarks.gpu_proof.cards import Card, read_cards
from tests.docs import support

ROOT = support.PAGE.parents[1]


def test_the_page_is_current() -> None:
    current = support.written(read_cards())
    assert support.PAGE.read_text(encoding="utf-8") == current, "run: python -m tests.docs.support"


@pytest.mark.parametrize("test", sorted(set(support.named_tests())))
def test_a_test_that_the_page_names_exists(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


CARD = Card(
    part="colocated loop",
    result="passed",
    command="python -m benchmarks.gpu_proof",
    commit="0123456789",
    date="2026-12-01",
    device="1 x NVIDIA H200",
    gpus=1,
    driver="580.65.06",
    versions={"torch": "2.14.1"},
    seconds=71.0,
    peak_memory_gib=61.25,
    numbers=[{"tokens per s": "9,000", "step s": "7.00"}],
)


def gpu_cells(text: str) -> dict[str, str]:
    """Row -> its last cell, of the tables whose last column is that of GPUs."""
    tables = text.split("## `make gpu-proof`")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables if line.startswith("| ")]
    return {" ".join(row[:2]): row[-1] for row in rows if row[-1] not in ("GPU", "---")}


def test_nothing_is_claimed_of_gpus_without_a_card() -> None:
    cells = gpu_cells(support.written([]))
    assert len(cells) > 25
    assert {*cells.values()} == {"not measured"}
    assert support.written([]).count("| not measured |") == len(cells) + len(PROOF)


@pytest.mark.parametrize("result", ["passed", "failed (code 1): out of memory | at a kernel"])
def test_a_card_fills_its_row_and_no_other(result: str) -> None:
    earlier = replace(CARD, date="2026-11-30", result="no answer within 80 s", commit="earlier")
    text = support.written([earlier, replace(CARD, result=result)])
    changed = {row: cell for row, cell in gpu_cells(text).items() if cell != "not measured"}
    [(row, cell)] = changed.items()
    assert row.startswith("`--colocate` ")
    assert cell == f"{result.split()[0]} on 1 x NVIDIA H200, 2026-12-01"
    [line] = [line for line in text.splitlines() if "0123456789" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:] == [
        *("1 x NVIDIA H200", result.replace("|", "/"), "tokens per s 9,000; step s 7.00", "61.25"),
        "2026-12-01, 0123456789",
    ]
    assert "earlier" not in text


def test_cards_that_are_checked_in_are_of_gpus_and_of_parts_that_exist(tmp_path: Path) -> None:
    path = CARD.write(tmp_path)
    assert (path.name, read_cards(tmp_path)) == ("2026-12-01-1-x-nvidia-h200-colocated-loop.json", [CARD])
    for card in [*read_cards(), *read_cards(tmp_path)]:
        assert card.gpus >= 1 and card.driver != "none"
        assert card.part in {part.name for part in PROOF}
    assert set(support.PROVEN_BY.values()) <= {part.name for part in PROOF}
    assert {*support.SHOWN_BY} == {part.group for part in PROOF}
    assert {*support.PROVEN_BY} <= {*support.MODES, *(f"dense `{name}`" for name in support.TRANSPORTS)}
