"""`make quickstart` does what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def quickstart(*flags: str) -> tuple[float, float, Path]:
    """Run it; returns held-out accuracy before and after reinforcement learning, and the run folder."""
    earlier = ROOT / "outputs" / "quickstart" / "checkpoints" / "rollout_000018"
    earlier.mkdir(parents=True, exist_ok=True)
    (earlier / "state.json").touch()  # as if it had been run before
    command = [sys.executable, "examples/quickstart/run.py", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    found = re.fullmatch(r"quickstart: held-out accuracy ([\d.]+) -> ([\d.]+), \d+ s, [\d.]+ GiB", last)
    assert found, last
    run_dir = ROOT / re.findall(r"^run folder: (\S+)", done.stdout, re.MULTILINE)[-1]
    for name in ("metrics.jsonl", "report.html", "config.toml", "plugins.json", "rollouts/000000.jsonl"):
        assert (run_dir / name).stat().st_size > 0, name
    assert list(run_dir.glob("events.out.tfevents*"))
    return float(found[1]), float(found[2]), run_dir


@pytest.mark.slow
def test_every_part_of_it_works() -> None:
    before, after, run_dir = quickstart("--num-rollout", "3")
    assert 0 <= before < 0.6 and 0 <= after < 0.6
    assert (run_dir / "rollouts" / "000002.jsonl").stat().st_size > 0


@pytest.mark.nightly
def test_reinforcement_learning_more_than_doubles_held_out_accuracy() -> None:
    before, after, run_dir = quickstart()
    assert after >= 0.6
    assert after >= 2 * before
    assert (run_dir / "rollouts" / "000017.jsonl").stat().st_size > 0


def test_engines_have_a_place_on_machines_with_any_number_of_gpus() -> None:
    words = [sys.executable, "-c", "import run; print([run.engine_flags(gpus) for gpus in (0, 1, 2, 8)])"]
    folder = ROOT / "examples" / "quickstart"
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "[['--rollout-num-gpus', '2'], ['--colocate'], [], []]\n"
