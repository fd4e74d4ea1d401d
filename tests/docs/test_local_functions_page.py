"""The code on docs/plugins/local-functions.md works unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.registry.local_runs import write

from slime.compat.functions import find_function
from slime.compat.shapes import ROLES
from slime.testing.check import check_component

PAGE = (Path(__file__).parents[2] / "docs" / "plugins" / "local-functions.md").read_text(encoding="utf-8")
#: the kind of each block
KINDS = ("reward", "generator", "generator", "datasource")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("kind", "block"), list(zip(KINDS, BLOCKS, strict=True)))
def test_every_code_block_works_as_a_component(tmp_path: Path, kind: str, block: str) -> None:
    component = find_function(kind, str(write(tmp_path, "mine.py", block)))
    assert component.factory() is not None


def test_the_generate_functions_pass_the_check_of_the_contract(tmp_path: Path) -> None:
    for kind, block in zip(KINDS, BLOCKS, strict=True):
        if kind == "generator":
            outcome = check_component(find_function(kind, str(write(tmp_path, "mine.py", block))))
            assert not outcome.problems, outcome.problems
            assert len(outcome.kept) == 10


def test_the_table_has_every_signature_and_default_name() -> None:
    rows = [row.replace("\\|", "|") for row in PAGE.splitlines() if row.startswith("|")]
    for role in ROLES.values():
        for shape in role.shapes:
            parameters = re.findall(r"\(.*?\)", shape.text)
            assert any(all(part in row for part in parameters) for row in rows), shape.text
        for names in role.usual[:1]:
            assert any(f"`{name}`" in row for row in rows for name in names), names
