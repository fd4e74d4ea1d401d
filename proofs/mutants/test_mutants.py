"""The program of `make mutants`: its changes, its draw, its list of equivalent changes and its verdicts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import proofs.mutants.__main__ as program
from proofs.mutants.__main__ import draw, equivalent_changes, mutants_of
from proofs.mutants.areas import AREAS, Area
from proofs.mutants.changes import candidates
from proofs.mutants.copied import ROOT

SOURCE = '''"""1 + 1 in a docstring."""
from x import y

@frozen(True)
def f(a: int = 3, *, b: "1 < 2" = None) -> list[1]:
    """Not 1 < 2 either."""
    if a < b and not g(a, options.low):
        raise ValueError(f"{a + 1} is wrong")
    logger.info("n", a + 1)
    total.add(x, strict=True)
    ä = a.sum() if a else -b[0]
    return "1 + 1"  # 1 + 1
'''


def test_every_change_is_of_one_line_and_of_code() -> None:
    lines = SOURCE.split("\n")
    found = {(change.line, change.changed(lines[change.line - 1]).strip()) for change in candidates(SOURCE)}
    assert found == {
        (5, 'def f(a: int = 4, *, b: "1 < 2" = None) -> list[1]:'),
        (7, "if a <= b and not g(a, options.low):"),
        (7, "if a < b or not g(a, options.low):"),
        (7, "if a < b and g(a, options.low):"),
        (7, "if False:"),
        (10, "pass"),
        (11, "ä = a.mean() if a else -b[0]"),
        (11, "ä = a.sum() if True else -b[0]"),
        (11, "ä = a.sum() if a else b[0]"),
        (11, "ä = a.sum() if a else -b[1]"),
    }


def test_an_argument_that_is_an_attribute_may_be_left_out() -> None:
    assert {change.apply("f(a=b.c)") for change in candidates("f(a=b.c)")} == {"f(a=None)", "pass"}


def test_the_draw_is_the_same_for_the_same_seed_and_even_over_the_areas() -> None:
    first = draw(60, 1)
    assert first == draw(60, 1) and first != draw(60, 2)
    assert [sum(one.area == area for one in first) for area in AREAS] == [10] * 6
    assert len({(one.file, one.change.line) for one in first}) == 60


def test_an_edit_changes_the_draw_of_its_own_lines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "ROOT", tmp_path)
    file = tmp_path / "toy.py"

    def drawn(source: str) -> list[tuple[str, str]]:
        file.write_text(source)
        return [(one.before, one.after) for one in draw(100, 1, {"toy": Area(("toy.py",), ())})]

    lines = [f"a{number} = b{number} + {number} * c" for number in range(20)]
    first = drawn("\n".join(lines))
    assert len(first) == 20
    edited = drawn("\n".join(["import d", "e = d < 3", *lines[:7], *lines[8:]]))
    assert [one for one in edited if one[0] != "e = d < 3"] == [one for one in first if one[0] != lines[7]]


@pytest.mark.parametrize("name", AREAS)
def test_the_files_and_tests_of_an_area_exist(name: str) -> None:
    area = AREAS[name]
    assert all(list(ROOT.glob(pattern)) for pattern in area.files)
    assert all((ROOT / test).exists() for stage in area.tests for test in stage)
    assert mutants_of(name, Area(area.files[:1], area.tests))


def test_every_equivalent_change_has_a_reason_and_its_line_is_still_there() -> None:
    equivalent_changes()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("before = 'import json'\nafter = 'pass'\nreason = ' '", "has no reason"),
        ("before = 'no such line'\nafter = 'pass'\nreason = 'why'", "is no line of that file"),
    ],
)
def test_a_row_without_reason_or_line_is_refused(row: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "equivalent.toml"
    path.write_text(f"[[equivalent]]\nfile = 'core/slime/errors/__init__.py'\n{row}\n")
    with pytest.raises(SystemExit, match=message):
        equivalent_changes(path)


RUN = """
import sys
from pathlib import Path
from proofs.mutants import copied
from proofs.mutants.__main__ import Mutant, report
from proofs.mutants.areas import Area
from proofs.mutants.changes import candidates

copied.TIMEOUT_S = 15.0
source, folder = map(Path, sys.argv[1:])
file = "core/slime/__init__.py"
text = (source / file).read_text()
lines = text.split("\\n")
mutants = [
    Mutant("toy", file, one, lines[one.line - 1].strip(), one.changed(lines[one.line - 1]).strip())
    for one in candidates(text)
]
known = {(file, "LIMIT = 9", "LIMIT = 10"): "nothing reads it"}
survivors = list(report(mutants, copied.Copy(folder, source), known, {"toy": Area((), (("tests",),))}))
print("left:", *(one.after for one in survivors), sep="|")
assert (folder / file).read_text() == text
"""


@pytest.mark.nightly
def test_killed_hanging_equivalent_and_surviving_changes_are_told_apart(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "copy"
    for part in (source / "core" / "slime", source / "tests", folder):
        part.mkdir(parents=True)
    (source / "core" / "slime" / "__init__.py").write_text(
        "LIMIT = 9\ndef f(n):\n    while n > 0:\n        n -= 1\n    return n\n\n\ndef unseen(n):\n    return n + n\n"
    )
    (source / "tests" / "test_f.py").write_text("import slime\ndef test_f():\n    assert slime.f(3) == 0\n")
    (source / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(source), str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left:|return n - n" in done.stdout
    assert "equivalent  toy" in done.stdout and "nothing reads it" in done.stdout
    assert "no end within 15 s" in done.stdout  # n += 1 for n -= 1
    assert "FAILED tests/test_f.py::test_f" in done.stdout  # n >= 0 for n > 0
