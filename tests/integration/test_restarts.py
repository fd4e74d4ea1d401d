"""Runs go on as if nothing had been: after a lost process, by themselves; after SIGTERM, with `--resume`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import SlimeRun, output_of, processes_marked

pytestmark = [pytest.mark.engine, pytest.mark.slow]
Start = Callable[..., SlimeRun]

#: a reward that holds a run amid its fourth rollout until the test goes on
HOLDING = """
import asyncio
from pathlib import Path

async def reward_func(args, sample):
    while sample.prompt >= "q012" and not Path("go on").exists():
        await asyncio.sleep(0.05)
    return float(len(sample.response) % 2)
"""


def held_run(start: Start, folder: Path, *flags: str) -> SlimeRun:
    """Start a run of five rollouts that saves after two, and waits amid the fourth."""
    (folder / "holding.py").write_text(HOLDING)
    common = ("--advantage-estimator", "grpo", "--custom-rm-path", "holding.py", "--save-interval", "2")
    return start("--num-rollout", "5", *common, *flags, reward=False)


def assert_complete(run: SlimeRun) -> None:
    """Every prompt was trained on exactly once, in order, as in an undisturbed run, and nothing is left running."""
    assert [row["step"] for row in run.steps()][-1] == 4
    prompts = [f"q{number:03d}" for number in range(20) for _ in range(2)]
    assert [prompt for rollout in range(5) for prompt in run.prompts(rollout)] == prompts
    assert run.left_over() == []


def test_a_killed_trainer_rank_restarts_the_run(slime_train: Start, tmp_path: Path) -> None:
    run = held_run(slime_train, tmp_path, "--use-fault-tolerance")
    run.wait_for_output(r"\b2/4")
    log = run.run_dir / "logs" / "trainer-0.log"
    [rank] = [p for p in processes_marked(run.mark) if output_of(p) == str(log.resolve())]
    rank.kill()
    run.wait_for_output("restart 1 of 3")
    (tmp_path / "go on").touch()
    assert run.wait() == 0, run.output
    assert_complete(run)
    rows = run.steps()
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row.get("restarts/run", 0) for row in rows] == [0, 0, 1, 0, 0]
    [abandoned] = map(json.loads, (run.run_dir / "abandoned_1" / "metrics.jsonl").read_text().splitlines())
    for name in ("step", "train/loss", "train/entropy", "train/grad_norm"):
        assert rows[2][name] == pytest.approx(abandoned[name], rel=1e-4), name
    line = "restart 1 of 3, from outputs/run/checkpoints/rollout_000002, 1 rollouts are repeated; cause: "
    told = [rest.splitlines()[0] for rest in run.output.split(line)[1:]]
    assert len(told) == 2  # when it happened, and at the end
    assert all("trainer rank 0" in cause and "SIGKILL" in cause for cause in told)


def test_sigterm_saves_after_the_step_and_the_run_folder_alone_continues(slime_train: Start, tmp_path: Path) -> None:
    run = held_run(slime_train, tmp_path)
    run.wait_for_output(r"\b2/4")
    run.process.terminate()
    run.wait_for_output("slime: SIGTERM: saving a checkpoint after this step, then ending, within 300 s")
    (tmp_path / "go on").touch()
    assert run.wait() == 143, run.output
    assert "Traceback" not in run.output
    assert run.left_over() == []
    assert run.output.endswith(
        "slime: preempted: ended by SIGTERM after 4 rollouts, all of them saved\n"
        "slime: to continue from the checkpoint rollout_000004:\n  slime train --resume outputs/run\n"
    )
    resumed = slime_train("--resume", "outputs/run", bare=True)
    assert resumed.wait() == 0, resumed.output
    assert_complete(resumed)
    assert [row["step"] for row in resumed.steps()] == [0, 1, 2, 3, 4]
