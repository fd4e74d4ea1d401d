"""What a person sees in a terminal of 80 and of 120 columns, as files in `screens/`, to be read when they change.

`SLIME_WRITE_SCREENS=1 pytest tests/cli/test_screens.py` writes them anew.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from plugins.viewer.tests.making import make_run
from tests.cli.conftest import Slime

import slime_planner.doctor as doctor
from slime.config import RunConfig
from slime.config.options import RolloutOptions
from slime.observe import observer as observing
from slime.observe.observer import RunObserver
from slime.observe.terminal import Terminal
from slime_planner.devices import Devices

SCREENS = Path(__file__).parent / "screens"
WIDTHS = (80, 120)
#: what depends on the release, which the screens are not about
_VERSION = re.compile(r"\b\d+\.\d+\.\d+(?:[.+]\w+)*\b")

pytestmark = pytest.mark.parametrize("width", WIDTHS)


@pytest.fixture
def screen(width: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Compares a text with the screen of a name."""
    monkeypatch.setenv("COLUMNS", str(width))

    def compare(name: str, text: str) -> None:
        file = SCREENS / f"{name}.{width}.txt"
        shown = "\n".join(line.rstrip() for line in _VERSION.sub("0.0.0", text).splitlines()) + "\n"
        if os.environ.get("SLIME_WRITE_SCREENS"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(shown, encoding="utf-8")
        assert shown == file.read_text(encoding="utf-8")
        # A command to copy stays in one line.
        commands = ("slime ", "again: slime ")
        assert [row for row in shown.splitlines() if len(row) > width and not row.strip().startswith(commands)] == []

    yield compare


def learning(step: int) -> dict[str, float]:
    """Metrics of a run that learns, with noise that has no meaning."""
    noise = Random(step).gauss(0, 0.5)
    return {
        "rollout/truncated_ratio": 0.02 + 0.005 * noise,
        "rollout/response_length_mean": 120 + 4 * noise,
        "rollout/tokens_per_s": 900 + 30 * noise,
        "train/logprob_gap_mean": 1e-4 * (1 + 0.1 * noise),
        "train/loss": 0.01 * (1 + 0.2 * noise),
        "train/grad_norm": 1.5 + 0.1 * noise,
        "train/lr": 1e-6,
        **({"eval/gsm8k": 0.2 + step / 50, "eval/gsm8k/low": 0.1 + step / 50, "eval/gsm8k/high": 0.3 + step / 50}
           if step % 8 == 0 else {}),
    }  # fmt: skip


def test_show(slime: Slime, tmp_path: Path, screen: Callable[[str, str], None]) -> None:
    make_run(tmp_path / "outputs" / "learns", 24, metrics=learning)
    make_run(tmp_path / "outputs" / "zero", 25, reward=lambda *_: 0.0)
    screen("show", slime("show", "outputs/learns").out)
    screen("show_of_no_reward", slime("show", "outputs/zero").out)


def test_compare(slime: Slime, tmp_path: Path, screen: Callable[[str, str], None]) -> None:
    one = "[run]\nseed = 1\n\n[megatron]\nlr = 0.001\n"
    make_run(tmp_path / "outputs" / "one", 24, metrics=learning, config=one)
    make_run(
        tmp_path / "outputs" / "other",
        24,
        reward=lambda step, *_: float(step % 3 == 0),
        metrics=lambda step: {**learning(step + 1), "train/lr": 2e-6},
        config="[run]\nseed = 1\n\n[megatron]\nlr = 0.002\n",
    )
    screen("compare", slime("compare", "outputs/one", "outputs/other").out)
    screen("compare_identical", slime("compare", "outputs/one", "outputs/one").out)


def test_help(slime: Slime, screen: Callable[[str, str], None]) -> None:
    screen("help", slime("--help").out)
    # The options follow, which have tests of their own.
    screen("train_help", slime("train", "--help").out.partition("[run]")[0])
    screen("train_help_sft", slime("train", "--help", "sft").out)


def test_plugins(slime: Slime, screen: Callable[[str, str], None]) -> None:
    screen("plugins", slime("plugins").out)


def test_doctor(slime: Slime, monkeypatch: pytest.MonkeyPatch, screen: Callable[[str, str], None]) -> None:
    monkeypatch.setattr(doctor, "find_devices", lambda: Devices())
    monkeypatch.setattr(sys, "prefix", "/opt/slime/.venv")
    monkeypatch.setattr(
        doctor, "package_problems", lambda: ["sglang 0.4.0 is installed, and slime needs sglang==0.5.23"]
    )
    monkeypatch.chdir("/")  # a long name of the folder would be wrapped
    ended = slime("doctor")
    assert ended.code == 1
    screen(
        "doctor",
        re.sub(
            r"disk( +).* free in [^\n]+",
            r"disk\g<1>8 GB free in /here",
            re.sub(r"\d+(?= of| GB| cores| work)", "8", ended.out),
        ),
    )


def test_a_run(tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch, screen: Callable[[str, str], None]) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("outputs/mine")
    folder.mkdir(parents=True)
    for name in ("seconds", "attempt_seconds"):
        monkeypatch.setattr(RunObserver, name, 8.2)
    monkeypatch.setattr(observing, "gibibytes", lambda _: "2.5 GiB")
    file = io.StringIO()
    observer = RunObserver(RunConfig(rollout=RolloutOptions(num_rollout=3, rollout_batch_size=4)), folder, file=file)
    observer.terminal = Terminal(2, file=file, width=width)
    observer.starting("Ray")
    observer.starting("1 engine(s), router, rollout process, 1 trainer rank(s)")
    observer.run_started(RunConfig(rollout=RolloutOptions(num_rollout=3, rollout_batch_size=4)), folder)
    for step in range(2):
        observer.step_finished(step, run_metrics(step))
    observer.checkpoint_saved(2, folder / "checkpoints" / "rollout_000002")
    observer.terminal.eval_finished("after 2 rollouts", {"eval/gsm8k": 0.25, "eval/gsm8k/samples": 64.0}, 1.5)
    observer.step_finished(2, run_metrics(2))
    observer.run_finished("interrupted")
    screen("run", file.getvalue())


def run_metrics(step: int) -> dict[str, Any]:
    return {
        "rollout/reward_mean": 0.25 * step,
        "rollout/response_length_mean": 120.5,
        "rollout/truncated_ratio": 0.0,
        "train/kl": 0.01,
        "train/entropy": 0.3,
        "train/logprob_gap_mean": 1e-7,
        "train/loss": 1e-3,
        "train/grad_norm": 1.25,
        "time/wait_rollout": 1.0,
        "time/train": 0.5,
        "time/sync_weights": 0.1,
        "time/step": 2.0,
    }
