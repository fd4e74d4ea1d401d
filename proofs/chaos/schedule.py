"""Runs the schedule and says what is wrong with the run in the end."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from proofs.chaos.bench import ChaosRun
from proofs.chaos.kinds import WORKER, Injected, Kind, strike

#: seconds until a run is ready, and until it has ended
_START_S, _END_S = 420.0, 240.0


def schedule(kinds: Sequence[Kind], count: int, seed: int) -> list[Kind]:
    """`count` faults in a random order: of every kind its share, and at least one."""
    total = sum(kind.share for kind in kinds)
    chosen = [kind for kind in kinds for _ in range(max(1, round(kind.share * count / total)))]
    rng = random.Random(seed)
    while len(chosen) < count:
        chosen.append(rng.choice(kinds))
    rng.shuffle(chosen)
    return chosen


def inject_all(
    run: ChaosRun, faults: Sequence[Kind], seed: int, *, save_interval: int, told: Callable[[Injected], None]
) -> None:
    """Inject the faults one after the other, each amid a step of its own; the run is at its end then.

    Args:
        run: The run, which has been started.
        faults: What to inject.
        seed: Of the moments and victims.
        save_interval: That of the run.
        told: Called with what became of each.
    """
    rng = random.Random(f"moments {seed}")
    run.target.wait_until(lambda: "ready after" in run.text(), "start", _START_S)
    run.allow(2)  # with what is done for the first time
    run.target.wait_until(lambda: 1 in run.steps(), "step 1", _START_S)
    began = time.monotonic()
    run.allow(3)
    run.target.wait_until(lambda: 2 in run.steps(), "step 2", _START_S)
    step_s = time.monotonic() - began
    for kind in faults:
        told(strike(run, kind, rng, step_s=step_s, save_interval=save_interval))


def finish(run: ChaosRun) -> None:
    """Let the run train the rest of its steps and end."""
    run.allow(10**6)
    run.target.process.wait(_END_S)


def steps_needed(faults: Sequence[Kind], save_interval: int) -> int:
    """How many steps a run has that gets all these faults."""
    return 5 + sum(save_interval if kind.cures == "disk" else 1 for kind in faults)


# --- what is in the end -------------------------------------------------------------------------------------


def problems(run: ChaosRun, number: int, prompts: Sequence[Sequence[str]], outcomes: Sequence[Injected]) -> list[str]:
    """What a run that has ended has lost, done twice, or left behind.

    Args:
        run: The run.
        number: Steps that it should have trained.
        prompts: The prompts of each of its rollouts, in order.
        outcomes: The faults.
    """
    found = []
    if run.target.process.returncode != 0:
        found.append(f"exit code {run.target.process.returncode}")
    history: dict[int, dict[str, Any]] = {row["step"]: row for row in run.rows() if "time/step" in row}
    if sorted(history) != list(range(number)):
        found.append(f"trained steps {sorted(history)} instead of {number}")
    for step, row in history.items():
        finite = [value for name, value in row.items() if name.startswith("train/") and not math.isfinite(value)]
        if finite or row["rollout/samples"] != len(prompts[step]):
            found.append(f"step {step} was trained on {row['rollout/samples']} samples; not finite: {finite}")
        most = 1 if any(one.step == step and one.kind.notice == WORKER for one in outcomes) else 0
        if row["rollout/failed"] > most:
            found.append(f"{row['rollout/failed']} samples of step {step} failed, expected at most {most}")
    for step, wanted in enumerate(prompts):
        if (got := prompts_of(run.folder, step)) != list(wanted):
            found.append(f"rollout {step} has other prompts: {len(set(got) ^ set(wanted))} differ")
    found += [f"{one.kind.name} at step {one.step} restarted the whole run" for one in outcomes if one.escalated]
    found += [f"left running: {command}" for command in run.target.end()]
    found += [f"left behind: {path}" for path in left_files(run)]
    return found


def prompts_of(folder: Path, rollout: int) -> list[str]:
    """The prompts of one rollout, one for each sample, in order."""
    path = folder / "rollouts" / f"{rollout:06d}.jsonl"
    return [str(json.loads(line)["prompt"]) for line in path.read_text(encoding="utf-8").splitlines()]


def left_files(run: ChaosRun) -> list[Path]:
    """Temporary files and shared memory of a run that has ended."""
    places = [run.scratch]
    places += [] if run.place is None else [run.place.path("/dev/shm")]
    found = [path for place in places for path in place.iterdir()]
    names = {path.name for path in run.place.path("/mnt/saved").iterdir()} if run.place is not None else set()
    return found + [Path(name) for name in names if name.startswith(".")]
