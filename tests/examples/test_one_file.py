"""The loop in one file, with fewer rollouts: it learns, with real engines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
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
    done = subprocess.run(
        [sys.executable, str(folder / "loop.py")],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.fullmatch(r"one-file: held-out accuracy ([\d.]+) -> ([\d.]+), \d+ s", done.stdout.splitlines()[-1])
    assert found, done.stdout
    assert float(found[2]) > float(found[1]) + 0.2
    gaps = [float(line.split()[-1]) for line in done.stdout.splitlines() if re.match(r"\s+\d+\s", line)]
    assert len(gaps) > 1 and max(gaps) < 1e-4
