"""Engines and the router that die or hang are restarted while the run goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.integration.conftest import SlimeRun, command_of, output_of, processes_marked

from slime.kit.processes import living_members

pytestmark = [pytest.mark.engine, pytest.mark.slow]
Start = Callable[..., SlimeRun]

#: scores no samples of later weights than those of the version in a file, so that a rollout stays open until the test
#: has injected its fault
REWARD = """
import asyncio, pathlib

LAST = pathlib.Path({last!r})

async def reward_func(args, sample, **kwargs):
    while int(sample.weight_versions[-1]) > int(LAST.read_text()):
        await asyncio.sleep(0.02)
    return float(len(sample.response) % 2)
"""
#: every response is as long as it may be, and so takes seconds
ENDLESS = json.dumps({"ignore_eos": True})
#: seconds in which requests reach an engine that is stopped and so keeps them
ARRIVAL_S = 2.0


def server_of(run: SlimeRun, log: str) -> psutil.Process:
    """The process of a run that writes to this log and leads its process group."""
    found = []
    for process in processes_marked(run.mark):
        with suppress(ProcessLookupError):  # it has just ended
            if output_of(process).endswith(f"/logs/{log}") and os.getpgid(process.pid) == process.pid:
                found.append(process)
    [server] = found
    return server


def scheduler_of(run: SlimeRun, engine: int) -> psutil.Process:
    """The scheduler of an engine. Its title covers the mark of the run."""
    members = living_members(server_of(run, f"engine-{engine}.log").pid)
    found = []
    for pid in members:
        with suppress(psutil.Error):  # it has just ended
            process = psutil.Process(pid)
            # A process that it has forked has its title for a moment.
            titles = [command_of(one)[:1] for one in (process, *process.parents()[:1])]
            if titles[0] == ["sglang::scheduler"] != titles[-1]:
                found.append(process)
    [scheduler] = found
    return scheduler


def samples_of(run: SlimeRun, rollout: int) -> list[dict[str, object]]:
    path = run.run_dir / "rollouts" / f"{rollout:06d}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.row("L6")
def test_engines_and_router_are_restarted_and_no_sample_is_lost_or_of_old_weights(
    slime_train: Start, tmp_path: Path
) -> None:
    last, reward = tmp_path / "last", tmp_path / "reward.py"
    reward.write_text(REWARD.format(last=str(last)))

    def let_finish(rollouts: int) -> None:
        """Hold every rollout after the first so many; the weights of the first have version 1."""
        last.with_name("new").write_text(str(rollouts))
        last.with_name("new").replace(last)

    let_finish(1)
    run = slime_train(
        "--num-rollout", "4", "--rollout-num-gpus", "2", "--max-restarts", "6",
        "--rollout-max-response-len", "300",
        "--advantage-estimator", "grpo", "--custom-rm-path", f"{reward}:reward_func", "--lr", "1e-2",
        "--entropy-coef", "0.1", "--sglang-preferred-sampling-params", ENDLESS, reward=False,
    )  # fmt: skip
    run.wait_until(lambda: (run.run_dir / "metrics.jsonl").exists() and run.steps(), what="step 0")

    # amid rollout 1: an engine that has requests is killed
    scheduler = scheduler_of(run, 1)
    scheduler.send_signal(signal.SIGSTOP)
    time.sleep(ARRIVAL_S)
    scheduler.kill()
    run.wait_for_output(r"engine 1 is back after [\d.]+ s, \d+ requests? repeated")

    # amid the weight sync after rollout 1: the other one does not answer any more
    scheduler_of(run, 0).send_signal(signal.SIGSTOP)
    let_finish(2)
    run.wait_for_output(r"engine 0 is back after")

    # amid rollout 2: the router ends
    os.kill(server_of(run, "router.log").pid, signal.SIGKILL)
    run.wait_for_output(r"the router is back after")
    let_finish(4)

    assert run.wait() == 0, run.output
    assert run.left_over() == []
    assert len(re.findall("^restarting ", run.output, re.MULTILINE)) == 3
    steps = run.steps()
    assert [row["step"] for row in steps] == [0, 1, 2, 3]
    assert [row["rollout/samples"] for row in steps] == [8] * 4
    assert sum(row.get("restarts/engine", 0) for row in steps) == 2
    assert sum(row.get("restarts/router", 0) for row in steps) == 1
    # Weights of the model folder, in an engine that was restarted, would differ from the trainer's by much more.
    assert all(row["train/grad_norm"] > 1e-2 for row in steps)
    assert all(row["train/logprob_gap_max"] < 1e-3 for row in steps)
    prompts: list[str] = []
    for number in range(4):
        samples = samples_of(run, number)
        assert {tuple(sample["weight_versions"]) for sample in samples} == {(str(number + 1),)}
        assert all(sample["status"] in ("completed", "truncated") for sample in samples)
        prompts += [sample["prompt"] for sample in samples]
    assert sorted(prompts) == sorted(2 * [f"q{number:03d}" for number in range(16)])
    log = (run.run_dir / "logs" / "driver.log").read_text()
    assert re.search(r"Last lines of \S+/engine-1\.log:\n", log)
