"""`slime view --demo`: a small run that is shown while it goes on, and ends with the page."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slime.cli.main import main
from slime.errors import SlimeError
from slime.observe.metrics import read_metrics
from slime_viewer import demo_run as making
from slime_viewer.demo import Demo


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restores what signals do, which the command changes for a process that ends with it."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def instead_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> Path:
    """Let a shell script take the place of the process of the run; returns the demo's folder, its third argument."""
    fake = tmp_path / "fake.sh"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    return tmp_path / "demo"


_BEGIN = 'mkdir "$3/run"; echo "[run]" > "$3/run/config.toml"; echo "it begins"'


def test_runs_and_a_demo_are_one_or_the_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["view", str(tmp_path), "--demo", str(tmp_path / "new")]) == 2
    assert "expected run folders, or --demo, which makes a run of its own; got both" in capsys.readouterr().err
    assert main(["view", "--port", "0"]) == 2
    assert "lists those in outputs/, which is not here" in capsys.readouterr().err


def test_a_folder_with_files_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    assert main(["view", "--demo", str(tmp_path)]) == 2
    assert f"--demo {tmp_path} is not empty; expected a folder that is empty or not there" in capsys.readouterr().err
    assert main(["view", "--demo", str(tmp_path / "mine")]) == 2
    assert f"the folder of the demo, {tmp_path}/mine, cannot be made: File exists" in capsys.readouterr().err


def test_without_a_folder_it_is_a_new_one_in_outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    demo = Demo(None)
    assert demo.folder.parent == tmp_path / "outputs" and demo.folder.name.startswith("demo-2")


def test_a_run_that_does_not_begin_is_told_with_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = instead_of_the_run(monkeypatch, tmp_path, "echo there is no engine; exit 3")
    assert main(["view", "--demo", str(folder)]) == 1
    told = capsys.readouterr().err
    assert f"the run of the demo failed with exit code 3; {folder}/train.log ends with:\nthere is no engine" in told


def test_a_run_that_fails_later_is_told_and_the_page_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The signal comes after the failure, from somebody who outlives the script.
    script = f"""{_BEGIN}; (
        for _ in $(seq 1200); do [ -e "$3/failed" ] && break; sleep 0.05; done
        [ -e "$3/failed" ] && touch "$3/signalled" && kill -INT $PPID
    ) & echo it broke; exit 4"""
    folder = instead_of_the_run(monkeypatch, tmp_path, script)
    finished = Demo.finished

    async def noted(demo: Demo) -> str:
        try:
            return await finished(demo)
        finally:
            (folder / "failed").touch()

    monkeypatch.setattr(Demo, "finished", noted)
    assert main(["view", "--demo", str(folder)]) == 1
    assert (folder / "signalled").exists()
    out, err = capsys.readouterr()
    assert f"\n{folder}/run  index of the samples: " in out and "\nopen http://127.0.0.1:" in out
    assert f"failed with exit code 4; {folder}/train.log ends with:\nit begins\nit broke" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_page_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    script = f'echo $$ > "$3/pid"; kill -{number.value} $PPID; exec sleep 600'
    folder = instead_of_the_run(monkeypatch, tmp_path, script)
    assert main(["view", "--demo", str(folder)]) == 0
    assert "open http" not in capsys.readouterr().out
    assert not psutil.pid_exists(int((folder / "pid").read_text()))


def test_a_run_that_does_not_heed_signals_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("slime_viewer.demo._END_S", 0.1)
    monkeypatch.setattr("slime_viewer.demo._END_AT_ONCE_S", 0.1)
    demo = Demo(instead_of_the_run(monkeypatch, tmp_path, f'trap "" TERM; {_BEGIN}; while :; do sleep 0.05; done'))

    async def begin_and_end() -> None:
        await demo.start()
        await demo.made()
        await demo.end()
        with pytest.raises(SlimeError, match="failed with exit code -9"):
            await demo.finished()

    asyncio.run(begin_and_end())


def test_the_files_of_the_demo_are_in_the_package() -> None:
    folder = Path(making.__file__).parent
    assert tomllib.loads((folder / "demo_run.toml").read_text())["rollout"]["num-rollout"] <= 100
    assert (folder / "demo_model.json").is_file()


def test_the_model_is_made_by_one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two threads that wait for each other took minutes for it on a busy machine."""
    import torch

    used: list[int] = []
    step, before = torch.optim.AdamW.step, torch.get_num_threads()
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *about: used.append(torch.get_num_threads()) or step(*about))
    monkeypatch.setattr(making, "_STEPS", 3)
    try:
        torch.set_num_threads(2)
        making._teach(tmp_path / "model", [(38, 7), (45, 6)])
    finally:
        torch.set_num_threads(before)
    assert used == [1, 1, 1]
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_reward_rises_and_a_signal_ends_everything(tmp_path: Path) -> None:
    for name, number in (("model", signal.SIGINT), ("engines", signal.SIGTERM), ("training", signal.SIGINT)):
        folder = tmp_path / name
        command = [sys.executable, "-m", "slime.cli.main", "view", "--demo", str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            started: list[psutil.Process] = []
            try:
                assert str(folder) in child.stdout.readline()
                while not started and child.poll() is None:
                    started = psutil.Process(child.pid).children(recursive=True)
                if name != "model":
                    assert child.stdout.readline().startswith(f"{folder}/run  index of")
                    assert child.stdout.readline().startswith("open http://127.0.0.1:")
                if name == "training":
                    _wait_for_rising(folder / "run")
                    started = psutil.Process(child.pid).children(recursive=True)
                    assert len(started) > 4
            finally:
                child.send_signal(number)
            out, err = child.communicate(timeout=120)
            assert (child.returncode, out, err) == (0, "", "")
        _, left = psutil.wait_procs(started, timeout=60)
        assert left == []
        assert [
            one for one in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(one.info["cmdline"] or [])
        ] == []


def _wait_for_rising(run: Path) -> None:
    deadline = time.monotonic() + 300
    while True:
        assert time.monotonic() < deadline, (run.parent / "train.log").read_text()[-2000:]
        time.sleep(0.5)
        if (run / "metrics.jsonl").exists():
            rewards = [row["rollout/reward_mean"] for row in read_metrics(run) if "rollout/reward_mean" in row]
            if len(rewards) > 4 and sum(rewards[-3:]) / 3 > rewards[0] + 0.2:
                return
