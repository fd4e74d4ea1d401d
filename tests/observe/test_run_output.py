"""What a run shows and keeps: its log, its start, how it was resumed, what is left to do, and full disks."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slime.config import RunConfig
from slime.config.options import RolloutOptions, RunOptions
from slime.errors import DiskFullError, TrainerError
from slime.observe import observer as module
from slime.observe.log import last_log_line
from slime.observe.metrics import read_metrics
from slime.observe.observer import RunObserver
from slime.observe.samples import write_whole
from slime.observe.step_line import StepLine, duration
from slime.observe.terminal import Terminal
from slime.observe.trackers import TrackerThread
from slime.plugin import Tracker

pytestmark = pytest.mark.slow

STEP = {"time/step": 60.0, "rollout/reward_mean": 0.5, "train/loss": 0.25, "train/kl": 0.1}


def config_of(run_dir: Path, **run: Any) -> RunConfig:
    options = RunOptions(output_dir=str(run_dir.parent), run_name=run_dir.name, **run)
    return RunConfig(run=options, rollout=RolloutOptions(num_rollout=11))


def observed(run_dir: Path, **run: Any) -> tuple[RunObserver, io.StringIO]:
    run_dir.mkdir(exist_ok=True)
    file = io.StringIO()
    return RunObserver(config_of(run_dir, **run), run_dir, file=file), file


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0s"), (99, "99s"), (100, "2m"), (5940, "99m"), (6000, "1h40"), (172_000, "47h47"), (180_000, "2d02h")],
)
def test_durations_are_short(value: float, text: str) -> None:
    assert duration(value) == text


def test_the_step_line_has_the_time_that_is_left() -> None:
    line = StepLine(10)
    header, first = list(line.lines(4, STEP, 80))[-2:]
    column = header.plain.split().index("left")
    assert first.plain.split()[column] == "6m"
    [second] = line.lines(5, {**STEP, "time/step": 20.0}, 80)
    assert second.plain.split()[column] == "3m"  # five steps of 40 s
    assert "left" not in list(StepLine(None).lines(4, STEP, 80))[-2].plain


def test_supervised_runs_show_their_loss_at_80_columns() -> None:
    many = dict.fromkeys(("train/grad_norm", "rollout/response_length_mean", "train/entropy", "train/kl"), 1.0)
    many |= {"train/loss": 0.25, "time/step": 2.0, "time/train": 1.0, "time/sync_weights": 1.0, "train/lr": 1.0}
    many |= {"time/kernel_overhead": 0.1, "rollout/truncated_ratio": 0.0, "time/wait_rollout": 1.0}
    header, line = list(StepLine(99).lines(0, many, 80))[-2:]
    assert "loss" in header.plain and "0.2500" in line.plain and len(line.plain) <= 80


def test_an_asynchronous_run_shows_who_waited_for_whom() -> None:
    metrics = {**STEP, "time/wait_rollout": 1.5, "rollout/ready": 2.0, "train/staleness_mean": 1.25}
    metrics["time/engines_idle"] = 0.75
    lines = [line.plain for line in StepLine(10).lines(4, metrics, 120)]
    shown = dict(zip(re.split(r"\s{2,}", lines[-2].strip()), lines[-1].split(), strict=True))
    assert (shown["wait s"], shown["ready"], shown["stale"], shown["idle s"]) == ("1.50", "2.0", "1.2", "0.75")
    assert "idle s: engines waited for the trainer" in " · ".join(lines[:-2])
    assert "gen s" in [line.plain for line in StepLine(10).lines(4, {**STEP, "time/wait_rollout": 1.5}, 120)][-2]


def test_a_quiet_run_shows_evaluations_warnings_and_the_end(tmp_path: Path) -> None:
    observer, file = observed(tmp_path / "run", quiet=True)
    observer.starting("Ray")
    observer.step_finished(0, STEP)
    observer.terminal.warn("careful")
    observer.terminal.eval_finished("after 1 rollouts", {"eval/held": 0.5}, 1.0)
    observer.run_finished("finished")
    text = file.getvalue()
    assert "starting" not in text and "reward" not in text
    assert "warning: careful" in text and "held" in text and text.index("finished") > text.index("held")


def test_the_log_has_every_line_with_its_time_and_the_error_with_its_traceback(tmp_path: Path) -> None:
    observer, _ = observed(tmp_path / "run", quiet=True)
    observer.starting("Ray")
    logging.getLogger("slime.tracker").info("it is connected")
    try:
        raise KeyError("bug")
    except KeyError:
        observer.run_finished("failed")
    lines = (tmp_path / "run/logs/driver.log").read_text().splitlines()
    stamp = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|ERROR) slime")
    stamped = [line for line in lines if stamp.match(line)]
    assert any(line.endswith("starting Ray") for line in stamped)
    assert any(line.endswith("it is connected") for line in stamped)
    assert "KeyError: 'bug'" in lines and "Traceback (most recent call last):" in lines
    assert not any("driver.log" in str(handler) for handler in logging.getLogger("slime").handlers)


def logged_by_slime(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What slime logged. Matplotlib warns too, if its first import on a machine is slow."""
    return [record for record in caplog.records if record.name.startswith("slime")]


def test_the_message_about_a_tracker_that_raises_names_the_log_that_has_the_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    observer, _ = observed(tmp_path / "run")

    def build() -> Tracker:
        raise KeyError("no such project")

    tracker = TrackerThread("tracker mine", build)
    tracker.finish("finished")  # it waits for rows before
    tracker.join(60)
    observer.run_finished("finished")
    log = tmp_path / "run/logs/driver.log"
    [shown] = [record.getMessage() for record in logged_by_slime(caplog) if record.levelno == logging.WARNING]
    assert f"tracker mine failed: {__file__}:" in shown and f"The full traceback is in {log}." in shown
    assert "in build\n" in log.read_text() and "KeyError: 'no such project'" in log.read_text()


def test_a_verbose_run_shows_what_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    observer, _ = observed(tmp_path / "run", verbose=True)
    logging.getLogger("slime.tracker").info("it is connected")
    observer.run_finished("finished")
    logging.getLogger("slime.tracker").info("after the end")
    error = capsys.readouterr().err
    assert "slime: INFO: it is connected" in error and "after the end" not in error and "steps" not in error


def test_a_slow_start_says_what_is_awaited_since_when_and_the_last_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer, file = observed(tmp_path / "run")
    (tmp_path / "run/logs/engine-0.log").write_text("[2026-01-01 10:00:00 TP0] \x1b[32mLoad weight end.\x1b[0m\n\n")
    observer.still_starting("engines")
    assert file.getvalue() == ""  # not at once
    monkeypatch.setattr(module, "STILL_EVERY_S", 0.0)
    observer.still_starting("engines")
    assert re.search(r"  \d+ s: starting engines; engine-0: .*Load weight end\.\n", file.getvalue())
    assert "\x1b" not in file.getvalue()


def test_a_terminal_shows_the_last_event_beside_the_bar() -> None:
    file = io.StringIO()
    terminal = Terminal(file=file)
    terminal._console = Console(file=file, force_terminal=True, width=80)
    terminal.progress("starting engines", note="engine-0: Load weight end. " + "x" * 100)
    terminal.hide_progress()
    assert "Load weight end" in file.getvalue()


def test_the_last_log_line_is_of_the_newest_log_with_text(tmp_path: Path) -> None:
    assert last_log_line(tmp_path) == ""
    (tmp_path / "router.log").write_text("2026-01-01 10:00:00,123 INFO ready\n  warnings.warn(\n")
    (tmp_path / "driver.log").write_text("not this\n")
    assert last_log_line(tmp_path) == "router: INFO ready"


def checkpoint_of(run_dir: Path, done: int) -> Path:
    path = run_dir / "checkpoints" / f"rollout_{done:06d}"
    path.mkdir(parents=True)
    (path / "config.toml").write_text(config_of(run_dir).to_toml())
    return path


def rows_of(run_dir: Path) -> list[tuple[int, dict[str, Any]]]:
    return [(row["step"], {n: v for n, v in row.items() if "/" in n}) for row in read_metrics(run_dir)]


def test_a_resumed_run_says_so_and_its_curve_goes_on_in_a_new_folder(tmp_path: Path) -> None:
    first, _ = observed(tmp_path / "first")
    for step in range(6):
        first.step_finished(step, {"rollout/reward_mean": step / 10})
        first._write(step + 1, {"eval/held": step / 10})
    path = checkpoint_of(tmp_path / "first", 4)
    second, file = observed(tmp_path / "second")
    second.resumed(path, 4)
    second.step_finished(4, {"rollout/reward_mean": 0.75})
    assert f"resumed from {path}, after 4 rollouts: continues with rollout 4" in " ".join(file.getvalue().split("\n"))
    rows = rows_of(tmp_path / "second")
    assert [step for step, _ in rows] == [0, 1, 2, 3, 4]
    # What was trained after the checkpoint is not part of this run; the evaluation of its weights is.
    assert rows[4][1] == {"eval/held": 0.3, "rollout/reward_mean": 0.75}
    assert rows[3][1]["rollout/reward_mean"] == 0.3


def test_a_resumed_run_in_the_same_folder_copies_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first, _ = observed(run_dir)
    first.step_finished(0, {"rollout/reward_mean": 0.5})
    first.run_finished("interrupted")
    path = checkpoint_of(run_dir, 1)
    again, _ = observed(run_dir)
    again.resumed(path, 1)
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("folder", ["run", "another"])
def test_evaluations_of_a_resumed_run_show_the_change_since_the_first(tmp_path: Path, folder: str) -> None:
    first, _ = observed(tmp_path / "run")
    for done, reward in ((0, 0.25), (2, 0.5)):
        first._write(done, {"eval/held": reward, "eval/held/count": 8})
    again, file = observed(tmp_path / folder)
    again.resumed(checkpoint_of(tmp_path / "run", 2), 2)
    again.terminal.eval_finished("after 4 rollouts", {"eval/held": 0.75, "eval/held/count": 8}, 1.0)
    assert "+0.5000" in file.getvalue()


def test_a_run_that_fails_says_what_is_saved(tmp_path: Path) -> None:
    observer, file = observed(tmp_path / "run")
    path = tmp_path / "run/checkpoints/rollout_000003"
    observer.checkpoint_saved(3, path)
    try:
        raise TrainerError("no")
    except TrainerError:
        observer.run_finished("failed")
    text = file.getvalue()
    assert f"saved: 3 rollouts, in {path}" in text
    assert "slime train" not in text.partition("run folder")[0]  # the command line has the command, in its last lines


def test_a_full_disk_is_one_line_with_file_and_free_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").symlink_to("/dev/full")  # every write to it fails as on a full disk
    observer, file = observed(run_dir)
    observer.step_finished(0, STEP)
    observer.step_finished(1, STEP)
    [warning] = [record.getMessage() for record in logged_by_slime(caplog) if record.levelno >= logging.WARNING]
    what = "metrics.jsonl cannot be written; the run continues: the disk is full"
    free = rf"[\d,]+ bytes are free in {run_dir}"
    assert re.fullmatch(rf"{what}: {run_dir}/metrics.jsonl cannot be written; {free}", warning)
    assert "1/10" in file.getvalue()


def test_samples_on_a_full_disk_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "000001.partial").symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match=rf"^the disk is full: {tmp_path}/000001.jsonl cannot be written; .* free"):
        write_whole(tmp_path / "000001.jsonl", json.dumps({"a": 1}).encode())
    assert list(tmp_path.iterdir()) == []


EXPORT_ON_A_FULL_DISK = """
import sys
from pathlib import Path
import torch
from slime.weights.hf_save import write_file
write_file(Path(sys.argv[1]) / "model.safetensors", {"weight": torch.zeros(100_000)})
"""


def test_an_export_to_a_full_disk_is_one_line(tmp_path: Path) -> None:
    run = (
        f"mount -t tmpfs -o size=64k tmpfs {tmp_path} && exec {sys.executable} -c '{EXPORT_ON_A_FULL_DISK}' {tmp_path}"
    )
    done = subprocess.run(["unshare", "-rm", "sh", "-c", run], capture_output=True, text=True, timeout=100, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"this machine mounts no file system for a user: {done.stderr}")
    full = rf"{tmp_path}/model.safetensors cannot be written: the disk is full; [\d,]+ bytes are free in {tmp_path}\."
    assert re.search(rf"CheckpointWriteError: {full}$", done.stderr.strip())
