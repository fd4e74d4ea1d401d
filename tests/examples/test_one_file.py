"""The loop in one file, with fewer rollouts: it learns, with real engines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.python import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.row("K2")
def test_held_out_accuracy_rises_in_twelve_rollouts(tmp_path: Path) -> None:
    source = (EXAMPLES / "one-file" / "loop.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 200
    shorter = source.replace("ROLLOUTS, PROMPTS, SAMPLES = 60,", "ROLLOUTS, PROMPTS, SAMPLES = 12,")
    assert shorter != source
    folder = tmp_path / "examples" / "one-file"
    folder.mkdir(parents=True)
    (folder / "loop.py").write_text(shorter, encoding="utf-8")
    for beside in ("common", "quickstart"):
        (tmp_path / "examples" / beside).symlink_to(EXAMPLES / beside)
    printed = run_python([str(folder / "loop.py")], tmp_path, timeout_s=800)
    found = re.fullmatch(r"one-file: held-out accuracy ([\d.]+) -> ([\d.]+), \d+ s", printed.splitlines()[-1])
    assert found, printed
    assert float(found[2]) > float(found[1]) + 0.2
    gaps = [float(line.split()[-1]) for line in printed.splitlines() if re.match(r"\s+\d+\s", line)]
    assert len(gaps) > 1 and max(gaps) < 1e-4
