"""`make quickstart` does what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_reinforcement_learning_more_than_doubles_held_out_accuracy() -> None:
    earlier = ROOT / "outputs" / "quickstart" / "checkpoints" / "rollout_000018"
    earlier.mkdir(parents=True, exist_ok=True)
    (earlier / "state.json").touch()  # as if it had been run before
    done = subprocess.run(
        [sys.executable, "examples/quickstart/run.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    found = re.fullmatch(r"quickstart: held-out accuracy ([\d.]+) -> ([\d.]+), \d+ s, [\d.]+ GiB", last)
    assert found, last
    before, after = float(found[1]), float(found[2])
    assert after >= 0.6
    assert after >= 2 * before
    run_dir = ROOT / re.findall(r"^run folder: (\S+)", done.stdout, re.MULTILINE)[-1]
    for name in ("metrics.jsonl", "report.html", "config.toml", "plugins.json", "rollouts/000017.jsonl"):
        assert (run_dir / name).stat().st_size > 0, name
    assert list(run_dir.glob("events.out.tfevents*"))
