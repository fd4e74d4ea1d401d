"""The short form of `make chaos`: a few faults of engines and router, which leave no trace in the run."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.tiny_models import make_tiny_model

from proofs.chaos.__main__ import BEGIN, END, PAGE, page_with
from proofs.chaos.bench import COMPONENTS, ChaosRun
from proofs.chaos.kinds import KINDS, Injected, _Seen
from proofs.chaos.schedule import finish, inject_all, problems, schedule, steps_needed

SEED, PROMPTS, SAMPLES, SAVE_INTERVAL = 7, 4, 2, 3
#: those that cost few seconds
SHORT = (
    "kill -9 of an engine's scheduler",
    "kill -9 of the router",
    "an engine's answers are garbage",
    "socket closed amid a weight sync",
    "socket closed instead of an answer",
    "truncated answer",
    "wall clock jumps",
)


@pytest.mark.nightly
@pytest.mark.engine
def test_a_run_with_faults_trains_every_prompt_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    faults = [kind for kind in KINDS if kind.name in SHORT]
    random.Random(SEED).shuffle(faults)
    number = steps_needed(faults, SAVE_INTERVAL)
    make_tiny_model(tmp_path / "model", "qwen3", seed=0)
    names = [f"q{prompt:03d}" for prompt in range(PROMPTS * number)]
    rows = "".join(json.dumps({"prompt": name, "label": "a"}) + "\n" for name in names)
    (tmp_path / "prompts.jsonl").write_text(rows)
    flags = ["--hf-checkpoint", str(tmp_path / "model"), "--prompt-data", str(tmp_path / "prompts.jsonl")]
    flags += ["--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(SAMPLES)]
    flags += ["--rollout-max-response-len", "8", "--num-rollout", str(number), "--rollout-num-gpus", "2"]
    flags += ["--sglang-max-total-tokens", "16384", "--lr", "1e-3", "--entropy-coef", "0.1"]
    flags += ["--advantage-estimator", "grpo", "--save-interval", str(SAVE_INTERVAL)]
    flags += ["--custom-generate-function-path", f"{COMPONENTS}:custom_generate"]
    flags += ["--custom-rm-path", f"{COMPONENTS}:reward_func"]
    flags += ["--use-fault-tolerance", "--max-restarts", "100"]
    run = ChaosRun(tmp_path / "run", flags, samples=PROMPTS * SAMPLES, place=None, gated=True)
    outcomes: list[Injected] = []
    try:
        inject_all(run, faults, SEED, save_interval=SAVE_INTERVAL, told=outcomes.append)
        finish(run)
        prompts = [
            [name for name in names[step * PROMPTS :][:PROMPTS] for _ in range(SAMPLES)] for step in range(number)
        ]
        found = problems(run, number, prompts, outcomes)
    finally:
        run.end()
    assert found == [], run.text()
    assert len(outcomes) == len(SHORT)
    noticed = {one.kind.name for one in outcomes if one.found_s is not None}
    assert noticed == {kind.name for kind in faults if kind.cures != "nothing"}


def test_a_schedule_has_every_kind_and_depends_on_its_seed_only() -> None:
    chosen = schedule(KINDS, 105, 1)
    assert set(chosen) == set(KINDS) and len(chosen) >= 100
    assert chosen == schedule(KINDS, 105, 1) != schedule(KINDS, 105, 2)


def test_the_page_gets_a_row_for_each_kind_with_medians_and_sums() -> None:
    stopped = KINDS[0]
    outcomes = [Injected(stopped, step, found, back, 1, 2) for step, found, back in ((3, 1.0, 4.0), (5, 2.0, 6.0))]
    page = page_with(f"before\n{BEGIN}\nold\n{END}\nafter\n", "a note", outcomes)
    row = f"| {stopped.name} | 2 | 1.5 s, at most 2.0 s | 5.0 s, at most 6.0 s | 2 steps, 4 requests |"
    assert row in page.splitlines()
    assert page.startswith(f"before\n{BEGIN}\na note\n") and page.endswith(f"{END}\nafter\n") and "old" not in page


def test_the_rows_of_the_page_are_kinds_of_faults() -> None:
    measured = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    names = re.findall(r"^\| ([^|]+) \| \d+ \|", measured, re.MULTILINE)
    assert set(names) <= {kind.name for kind in KINDS} and names


class FakeRun:
    """Stands in for a run that is killed: what it says and records is written by the test."""

    def __init__(self) -> None:
        self.allowed, self.said, self.recorded = 4, "", [_step(0), _step(1), _step(2), {"step": 2, "eval/set": 1.0}]

    def text(self, log: str = "") -> str:
        return "" if log else self.said

    def rows(self) -> list[dict[str, Any]]:
        return list(self.recorded)

    def spoiled(self) -> list[float]:
        return []

    def is_spoiling(self) -> bool:
        return False


def _step(number: int, attempt: int = 1) -> dict[str, Any]:
    return {"step": number, "time/step": 0.1, "attempt": attempt}


def test_a_run_has_recovered_when_its_last_start_has_done_the_step() -> None:
    """Though it has set aside what was recorded of the steps that it takes again."""
    run = FakeRun()
    [kind] = [one for one in KINDS if one.name == "kill -9 of Ray's GCS"]
    seen, fault = _Seen(cast(ChaosRun, run), kind), Injected(kind, run.allowed)
    run.recorded.append(_step(3))
    assert not seen.recovered(fault)  # the step was done before the fault was noticed
    run.said = "ending the run: the GCS\nrestart 1 of 9, from saved/rollout_000002, 2 rollouts are repeated\n"
    assert seen.noticed() and not seen.recovered(fault)
    fault.found_s = 0.1
    run.said += "run outputs/run, ready after 9 s\n"
    assert not seen.recovered(fault)  # nothing is set aside yet: steps 2 and 3 are those of before
    del run.recorded[4], run.recorded[2]
    assert run.recorded == [_step(0), _step(1), {"step": 2, "eval/set": 1.0}] and not seen.recovered(fault)
    run.recorded.append(_step(2, attempt=2))
    assert not seen.recovered(fault)
    run.recorded.append(_step(3, attempt=2))
    assert seen.recovered(fault) and seen.repeated == 2
