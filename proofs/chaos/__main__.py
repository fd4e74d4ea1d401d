"""`make chaos`: many faults in one run of the quickstart's model, and the table of docs/reliability.md.

`python -m proofs.chaos [--count 105] [--seed 1] [--only PATTERN] [--write]`
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from proofs.chaos.bench import COMPONENTS, ChaosRun, Place
from proofs.chaos.kinds import KINDS, Injected
from proofs.chaos.schedule import finish, inject_all, problems, prompts_of, schedule, steps_needed
from slime.observe.metrics import read_metrics

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- chaos: begin -->", "<!-- chaos: end -->"
#: a checkpoint of the quickstart takes 12 MB, and three are there while one is written
DISK = "160m"
PROMPTS, SAMPLES, SAVE_INTERVAL = 8, 8, 5
#: how far two runs that differ in chance alone may be apart in held-out accuracy, beyond the evaluations' own intervals
TRAINING_NOISE = 0.03


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m proofs.chaos", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="number of faults")
    parser.add_argument("--seed", type=int, default=1, help="chooses their order, moments and victims")
    parser.add_argument("--only", default="", help="kinds whose name matches this regular expression")
    parser.add_argument("--model", help="use the folders model and data that are here, instead of making them anew")
    parser.add_argument("--calm", help="the folder of a run without faults, of as many steps, instead of another one")
    parser.add_argument("--write", action="store_true", help="write the table to docs/reliability.md")
    options = parser.parse_args()
    faults = schedule([kind for kind in KINDS if re.search(options.only, kind.name)], options.count, options.seed)
    number = steps_needed(faults, SAVE_INTERVAL)
    folder = Path(tempfile.mkdtemp(prefix="slime-chaos-"))
    if options.model is None:
        _model_and_data(folder)
    else:
        shutil.copytree(options.model, folder, dirs_exist_ok=True)
    flags = [str(ROOT / "examples/quickstart/grpo.toml"), "--hf-checkpoint", str(folder / "model")]
    flags += ["--prompt-data", str(folder / "data/train.jsonl")]
    flags += ["--eval-prompt-data", "held_out", str(folder / "data/held_out.jsonl"), "--eval-interval", "40"]
    flags += ["--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(SAMPLES)]
    flags += ["--global-batch-size", str(PROMPTS * SAMPLES), "--num-rollout", str(number)]
    flags += ["--rollout-num-gpus", "2", "--actor-num-gpus-per-node", "1"]
    flags += ["--lr", "1e-4"]  # for the smaller batch
    flags += ["--save", "/mnt/saved", "--save-interval", str(SAVE_INTERVAL), "--save-keep-last", "2"]
    flags += ["--save-hf", "/mnt/trained", "--log-samples-interval", "1000"]
    flags += ["--custom-generate-function-path", f"{COMPONENTS}:custom_generate"]
    flags += ["--custom-rm-path", f"{COMPONENTS}:reward_func"]
    flags += ["--use-fault-tolerance", "--max-restarts", "1000"]
    outcomes: list[Injected] = []
    print(f"{len(faults)} faults in {number} steps, and beside it the run without them ({folder})", flush=True)
    began = time.monotonic()
    with ExitStack() as last_to_first:
        runs = {}
        for name in ("run",) if options.calm else ("calm", "run"):
            place = Place(DISK)
            last_to_first.callback(place.close)
            gated = name == "run"
            runs[name] = ChaosRun(folder / name, flags, samples=PROMPTS * SAMPLES, place=place, gated=gated)
            last_to_first.callback(runs[name].end)
        run, calm = runs["run"], runs.get("calm")
        inject_all(run, faults, options.seed, save_interval=SAVE_INTERVAL, told=lambda one: _tell(one, outcomes))
        finish(run)
        minutes = (time.monotonic() - began) / 60
        if calm is not None:
            assert calm.target.process.wait(3600) == 0, calm.text()
        without_faults = Path(options.calm) if calm is None else calm.folder
        prompts = [prompts_of(without_faults, step) for step in range(number)]
        found = [] if calm is None else problems(calm, number, prompts, [])
        found += problems(run, number, prompts, outcomes)
        accuracy, apart = _accuracy(without_faults, run.folder)
        found += apart
    note = (
        f"{len(outcomes)} faults in {number} steps, seed {options.seed}, {minutes:.0f} minutes, on"
        f" {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[2]:.0f}. {accuracy}"
    )
    print("", note, table(outcomes), *found, sep="\n")
    if options.write and not found:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), note, outcomes), encoding="utf-8")
    if not found:
        shutil.rmtree(folder)
    return 1 if found else 0


def _tell(one: Injected, outcomes: list[Injected]) -> None:
    outcomes.append(one)
    noticed = "not noticed" if one.found_s is None else f"found after {one.found_s:.1f} s"
    lost = f"{one.steps_repeated} steps, {one.requests_repeated} requests repeated, {one.samples_failed} rewards"
    more = ", THE WHOLE RUN RESTARTED" if one.escalated else ""
    where = f"{len(outcomes)}. {one.kind.name} at step {one.step}"
    print(f"{where}: {noticed}, back after {one.back_s:.1f} s, {lost}{more}", flush=True)


def _model_and_data(folder: Path) -> None:
    """The quickstart's questions, and its model, taught by the same teacher with plain torch."""
    sys.path += [str(ROOT / "examples" / "common"), str(ROOT / "examples" / "quickstart")]
    from make_data import make_data
    from teach import teach

    torch.set_num_threads(1)  # more only wait for each other on a busy machine
    make_data(folder / "data")
    rows = [json.loads(line) for line in (folder / "data" / "teacher.jsonl").read_text(encoding="utf-8").splitlines()]
    lessons = [(row["prompt"][0]["content"], row["label"]) for row in rows]
    teach(folder / "model", lambda rng: rng.choice(lessons), steps=600)


def _accuracy(calm: Path, run: Path) -> tuple[str, list[str]]:
    """A sentence about the held-out accuracy after the last step, with and without faults; what is wrong with it."""
    name = "eval/held_out"
    ends = [[row for row in read_metrics(folder) if name in row][-1] for folder in (calm, run)]
    halves = [(end[f"{name}/high"] - end[f"{name}/low"]) / 2 for end in ends]
    within = (halves[0] ** 2 + halves[1] ** 2) ** 0.5 + TRAINING_NOISE
    without, with_faults = (end[name] for end in ends)
    text = (
        f"Held-out accuracy is {with_faults:.3f}, and {without:.3f} without faults; a difference of {within:.3f} would"
        f" be noise (95 % intervals of both evaluations, and {TRAINING_NOISE} for training)."
    )
    return text, [] if abs(without - with_faults) <= within else [text]


def table(outcomes: Sequence[Injected]) -> str:
    """One row for each kind of fault."""
    lines = ["| fault | times | found after | recovered after | work lost |", "| --- | --- | --- | --- | --- |"]
    for kind in KINDS:
        these = [one for one in outcomes if one.kind == kind]
        if not these:
            continue
        found = [one.found_s for one in these if one.found_s is not None]
        lost = {
            "step": sum(one.steps_repeated for one in these),
            "request": sum(one.requests_repeated for one in these),
            "reward": sum(one.samples_failed for one in these),
        }
        work = ", ".join(f"{number} {what}{'s'[: number != 1]}" for what, number in lost.items() if number) or "none"
        row = [kind.name, str(len(these)), _seconds(found), _seconds([one.back_s for one in these]), work]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def _seconds(values: Sequence[float]) -> str:
    if not values:
        return "no need"
    return f"{statistics.median(values):.1f} s" + (f", at most {max(values):.1f} s" if len(values) > 1 else "")


def page_with(page: str, note: str, outcomes: Sequence[Injected]) -> str:
    """The page with a new table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{note}\n\n{table(outcomes)}\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
