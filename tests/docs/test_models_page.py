"""docs/models.md has every family and every small model, with the numbers of `python -m tests.train.models_table`."""

from __future__ import annotations

import re

import pytest
from tests.engine.test_model_families import NOT_SERVED
from tests.engine.test_model_families import TOLERANCE as ENGINE
from tests.support.tiny_models import FAMILIES
from tests.train.models_table import BEGIN, END, HEAD, PAGE, Row, family_of, layouts_of, table_with

from slime.testing.family_numbers import LOG_PROBS, WEIGHTS
from slime_families import slime_register_families

TEXT = PAGE.read_text(encoding="utf-8")
TABLE = TEXT.partition(BEGIN)[2].partition(END)[0]
ROWS = {
    cells[0].strip("`"): cells[1:]
    for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.strip().splitlines()[2:])
}


def test_every_family_is_described() -> None:
    before = TEXT.partition(BEGIN)[0]
    described = re.findall(r"^\| `(\w+)` \|", before, re.MULTILINE)
    assert described == [spec.name for spec in slime_register_families()]


def test_every_small_model_has_a_row() -> None:
    assert list(ROWS) == list(FAMILIES)
    assert f"\n{HEAD}" in TABLE


@pytest.mark.parametrize("model", FAMILIES)
def test_a_row_has_the_layouts_and_numbers_within_the_tolerances(model: str) -> None:
    family, layouts, trainer, weights, engine = ROWS[model]
    assert (family, layouts) == (f"`{family_of(model)}`", ", ".join(layouts_of(model)))
    assert 0 < float(trainer) < LOG_PROBS
    assert 0 < float(weights) < WEIGHTS
    assert (engine == "not served") if model in NOT_SERVED else 0 < float(engine) < ENGINE


def test_a_measured_row_replaces_the_one_before() -> None:
    page = f"a\n{BEGIN}\n{HEAD}| `glm` | old |\n| `qwen3` | kept |\n{END}\nb\n"
    changed = table_with(page, [Row("glm", 2.4e-7, 1e-8, None)])
    assert "| `glm` | `glm` | one rank, TP=2, PP=2 | 2e-07 | 1e-08 | not served |\n| `qwen3` | kept |" in changed
    assert "old" not in changed and changed.startswith("a\n") and changed.endswith("\nb\n")
