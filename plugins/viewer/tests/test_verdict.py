"""The verdict: a run is called healthy only if it is known to be, and all who show a run say the same of it."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plugins.viewer.tests.making import make_run
from plugins.viewer.tests.test_report import data_of

from slime.cli.main import main
from slime_viewer.alerts import alerts
from slime_viewer.progress import RunProgress, progress
from slime_viewer.report import write_report_page
from slime_viewer.run_files import RunFolder
from slime_viewer.server import WatchedRun
from slime_viewer.verdict import Verdict, duration, verdict

TOTAL = "[rollout]\nnum_rollout = 400\n"


def ended_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def killed(folder: Path, steps: int = 37, **made: Any) -> Path:
    """A run whose process is gone."""
    make_run(folder, steps, **{"config": TOTAL, "finished": False, **made})
    lock = {"pid": ended_pid(), "host": socket.gethostname(), "finished": None}
    (folder / "run.lock").write_text(json.dumps(lock))
    return folder


def judged(folder: Path, **asked: Any) -> tuple[RunProgress, Verdict]:
    run = RunFolder(folder)
    run.metrics.refresh()
    gone = progress(run, **asked)
    return gone, verdict(run, gone, alerts(run.metrics))


# --- the four states ---------------------------------------------------------------------------------


def test_a_healthy_run_says_which_checks_passed_over_which_steps(tmp_path: Path) -> None:
    _, found = judged(make_run(tmp_path / "run", 12))
    assert (found.state, found.title, found.alerts) == ("healthy", "Healthy", ())
    [reason] = found.reasons
    assert reason.startswith("Checked over steps 0 to 11: finite numbers, reward, entropy, restarts.")
    assert "Not logged, so not checked: groups of equal reward, cut-off answers, log-prob gap" in reason


def test_a_run_that_was_killed_did_not_finish_and_says_how_to_go_on(tmp_path: Path) -> None:
    folder = killed(tmp_path / "run")
    (folder / "checkpoints" / "rollout_000030").mkdir(parents=True)
    (folder / "checkpoints" / "rollout_000020").mkdir()
    gone, found = judged(folder)
    assert (gone.state, gone.done, gone.total) == ("killed", 37, 400)
    assert (found.state, found.title) == ("unfinished", "Did not finish: 37 of 400 steps")
    assert time.strftime("It ended on %Y-%m-%d at ") in found.reasons[0] and "killed, out of memory" in found.reasons[0]
    assert found.command == f"slime train --resume {folder}" and "goes on after 30 rollouts" in found.command_note


def test_without_a_checkpoint_the_command_begins_anew(tmp_path: Path) -> None:
    _, found = judged(killed(tmp_path / "run"))
    assert found.command == f"slime train {tmp_path}/run/config.toml --run-name run-again"
    assert "no checkpoint" in found.command_note


@pytest.mark.parametrize(
    ("lines", "state", "reason"),
    [
        (["INFO slime.observe.terminal: interrupted  37 steps, 80 s"], "interrupted", "by Ctrl-C or SIGTERM"),
        (["ERROR slime.observe.observer: the disk is full", "INFO slime.observe.terminal: failed  37 steps"], "failed",
         "by an error: the disk is full"),
        (["INFO slime.observe.terminal: failed  3 steps", "=== the run begins here, or begins again ==="], "killed",
         "does not say why"),
    ],
)  # fmt: skip
def test_the_log_says_by_what_a_run_ended(tmp_path: Path, lines: list[str], state: str, reason: str) -> None:
    folder = killed(tmp_path / "run")
    with (folder / "logs" / "driver.log").open("a") as log:
        log.writelines(one + "\n" if one.startswith("=") else f"2026-01-01 10:00:01,123 {one}\n" for one in lines)
    gone, found = judged(folder)
    assert gone.state == state and reason in found.reasons[0]


def test_an_alert_of_a_run_that_did_not_finish_is_told_too_and_nan_comes_first(tmp_path: Path) -> None:
    def spoiled(step: int) -> dict[str, float]:
        return {"rollout/truncated_ratio": 0.9, "train/loss": math.nan if step == 9 else 1.0}

    _, found = judged(killed(tmp_path / "run", 12, metrics=spoiled, reward=lambda *_: 0.0))
    assert found.state == "unfinished"
    assert "no finite value" in found.alerts[0].text and len(found.alerts) >= 3


def test_twenty_five_rollouts_of_reward_zero_are_worth_a_look(tmp_path: Path) -> None:
    _, found = judged(
        make_run(tmp_path / "run", 25, reward=lambda *_: 0.0, metrics=lambda _: {"rollout/reward_std": 0.0})
    )
    assert found.state == "look"
    assert found.alerts[0].text == "every sample of every step has the reward 0 (25 steps)"


def test_what_is_worth_a_look_in_a_run_of_few_steps_is_told_with_what_is_not_known(tmp_path: Path) -> None:
    _, found = judged(make_run(tmp_path / "run", 3, metrics=lambda step: {"train/loss": math.nan if step else 1.0}))
    assert (found.state, found.alerts[0].text) == ("look", "train/loss had no finite value, first in step 1")
    few = "Too few steps: 3 steps with a reward; 6 are needed."
    assert found.reasons == ("Nothing else can be judged.", few)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (0, "No step was trained: there is nothing to judge."),
        (3, "Too few steps: 3 steps with a reward; 6 are needed."),
    ],
)
def test_of_too_few_steps_nothing_is_said(tmp_path: Path, steps: int, reason: str) -> None:
    _, found = judged(make_run(tmp_path / "run", steps))
    assert (found.state, found.title, found.reasons, found.alerts) == ("unknown", "Cannot judge", (reason,), ())


def test_a_run_of_which_most_rows_are_lost_cannot_be_judged(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 12)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(line if n in (0, 11) else "#" + line for n, line in enumerate(lines)))
    _, found = judged(folder)
    assert found.state == "unknown"
    assert found.reasons[0] == "10 of 12 rows of metrics.jsonl are damaged, so what happened in them is unknown."
    (folder / "metrics.jsonl").write_text("".join(lines[:2] + lines[7:]))
    assert judged(folder)[1].reasons == ("5 of 12 steps up to step 11 are not in metrics.jsonl.",)
    (folder / "metrics.jsonl").unlink()
    assert judged(folder)[1].reasons[0].startswith("metrics.jsonl is missing")


def test_a_supervised_run_is_judged_by_its_loss(tmp_path: Path) -> None:
    def rows(loss: Callable[[int], float]) -> str:
        return "".join(json.dumps({"step": n, "train/loss": loss(n), "time/step": 1.0}) + "\n" for n in range(12))

    folder = make_run(tmp_path / "run", 1)
    (folder / "metrics.jsonl").write_text(rows(lambda step: 2.0 - 0.1 * step))
    assert judged(folder)[1].state == "healthy"
    (folder / "metrics.jsonl").write_text(rows(lambda _: 2.0))
    assert "loss has not fallen: 2 in the first 4 steps" in judged(folder)[1].alerts[0].text


# --- how a run goes ----------------------------------------------------------------------------------


def test_a_run_that_goes_on_has_a_time_left_and_one_that_is_silent_is_worth_a_look(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 12, config=TOTAL)
    (folder / "run.lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "finished": None}))
    gone, found = judged(folder)
    assert (gone.state, gone.left_s, found.title) == ("running", 388 * 2.0, "Healthy so far")
    gone, found = judged(folder, now=time.time() + 700)
    assert (gone.state, gone.left_s, found.state) == ("silent", None, "look")
    assert "nothing was written since" in found.alerts[0].text and "12 of 400 steps" in found.alerts[0].text


def test_a_run_of_another_host_is_not_called_running_for_ever(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 12, config=TOTAL, finished=False)
    assert judged(folder)[0].state == "elsewhere"
    gone, found = judged(folder, now=time.time() + 700)
    assert gone.state == "silent" and "its process 1 is on elsewhere" in found.alerts[0].text


def test_a_number_that_another_process_has_got_since_is_not_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 12)
    lock = folder / "run.lock"
    lock.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "finished": None}))
    os.utime(lock, (time.time() - 10**6, time.time() - 10**6))
    assert judged(folder)[0].state == "killed"
    for content in ("[]", "{", '{"pid": "x"}', '{"pid": 1}', "[" * 100_000):
        lock.write_text(content)
        assert judged(folder)[0].state == "unknown"


def test_a_run_of_which_nobody_knows_whether_it_ended_is_not_called_healthy(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 12, config=TOTAL)
    (folder / "run.lock").unlink()
    _, found = judged(folder)
    assert (found.state, found.title) == ("unknown", "Cannot judge")
    assert "run.lock is missing or damaged" in found.reasons[0] and "12 of 400 steps" in found.reasons[0]
    (folder / "config.toml").write_text(TOTAL.replace("400", "12"))
    assert judged(folder)[1].state == "healthy"


def test_how_long_a_run_is_quiet_is_counted_by_the_clock_of_the_machine_that_reads_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 12)
    written = time.time() - 300
    for name in ("metrics.jsonl", "run.lock", "logs/driver.log"):
        os.utime(folder / name, (written, written))
    assert judged(folder, now=written + 42)[0].quiet_s == pytest.approx(42, abs=0.01)
    assert judged(folder, now=written - 42)[0].quiet_s == 0.0


# --- one source --------------------------------------------------------------------------------------


@pytest.mark.row("V2")
@pytest.mark.parametrize("kind", ["healthy", "killed", "empty", "damaged", "zero"])
def test_page_report_and_terminal_say_the_same(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    if kind == "killed":
        killed(folder)
    else:
        steps = {"empty": 0, "zero": 25}.get(kind, 12)
        flat: dict[str, Any] = {"reward": lambda *_: 0.0, "metrics": lambda _: {"rollout/reward_std": 0.0}}
        make_run(folder, steps, **(flat if kind == "zero" else {}))
    if kind == "damaged":
        (folder / "metrics.jsonl").write_text("#\n" * 10 + "".join((folder / "metrics.jsonl").open().readlines()[:2]))
    run = WatchedRun(folder)
    run._look()
    page = run.answer()["verdict"]
    run.end()
    assert main(["show", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == page["title"]
    if kind == "killed":
        assert f"    {page['command']}" in lines
    else:
        write_report_page(folder, "finished")
        told = data_of(folder)["run"]["verdict"]
        assert {**told, "command": page["command"]} == json.loads(json.dumps(page))


def test_durations_are_written_for_people() -> None:
    assert [duration(one) for one in (0.84, 45.2, 725, 12_000)] == ["0.84 s", "45 s", "12 min", "3 h 20 min"]
