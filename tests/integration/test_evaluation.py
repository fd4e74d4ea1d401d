"""`slime eval`, and evaluations beside training, with real engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import SlimeRun

Start = Callable[..., SlimeRun]

SETTINGS = ("--n-samples-per-eval-prompt", "4", "--eval-temperature", "1", "--eval-max-response-len", "8")


def slime_eval(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("slime")), "eval", *words, "--run-name", "scored"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=350)


def results(folder: Path) -> Any:
    return json.loads((folder / "outputs" / "scored" / "results.json").read_text())


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.row("E1")
def test_a_checkpoint_gets_the_score_that_its_run_reported(slime_train: Start, data: Path) -> None:
    run = slime_train(
        *("--num-rollout", "4", "--async", "--save", "saved", "--eval-prompt-data", "held", str(data)),
        *("--eval-interval", "2", *SETTINGS),
        *("--save-interval", "1", "--save-keep-last", "1", "--save-keep-best", "eval/held"),
    )
    assert run.wait(400) == 0, run.output
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if "eval/held" in row]
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    for row in evaluations:  # of their own weights, whatever was trained in the meantime
        path = run.run_dir / "rollouts" / f"eval_held_{row['step']:06d}.jsonl"
        versions = {tuple(json.loads(line)["weight_versions"]) for line in path.read_text().splitlines()}
        assert versions == {(str(int(row["eval/held/weight_version"])),)}
    assert evaluations[1]["eval/held/weight_version"] == 3
    # Each evaluation finished after the checkpoint of its weights was saved; those after 1 and 3 have none.
    best = 2 if evaluations[1]["eval/held"] > evaluations[2]["eval/held"] else 4
    assert {path.name for path in (run.root / "saved").iterdir()} == {
        "latest",
        "run.lock",
        "rollout_000004",
        f"rollout_00000{best}",
    }

    ended = slime_eval(run.root, str(run.root / "saved"))
    assert ended.returncode == 0, ended.stderr
    assert "eval of " in ended.stdout and "pass@4" in ended.stdout and "95% interval" in ended.stdout
    names = ("held", "held/response_length_mean", "held/truncated_ratio", "held/pass@4")
    [held] = results(run.root)["sets"]
    scored = {"held": held["mean_reward"]["value"], **{f"held/{key}": value for key, value in held["metrics"].items()}}
    assert {name: scored[name] for name in names} == {name: evaluations[-1][f"eval/{name}"] for name in names}
    assert results(run.root)["rollouts_done"] == 4
    assert not list((run.root / "outputs" / "scored").glob(".model*"))
