"""A tracker that fails does not end the run: its first error is logged, and the rows it missed are counted."""

from __future__ import annotations

import io
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slime.config import RunConfig, read_config
from slime.observe.observer import RunObserver
from slime.observe.trackers import TrackerThread, close_all
from slime.registry.plugin_set import load_plugins


class Recorder:
    """A tracker that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.outcome = ""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self, outcome: str) -> None:
        self.outcome = outcome


class Broken(Recorder):
    """A tracker whose disk is full."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step % 2:
            raise OSError(28, "No space left on device")
        super().log(step, metrics)


class Hanging(Recorder):
    """A tracker that waits for a network that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = threading.Event()
        self.waiting = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.waiting += 1
        self.answered.wait(60)
        super().log(step, metrics)


def test_rows_arrive_in_order_without_values_that_are_not_finite() -> None:
    recorder = Recorder()
    thread = TrackerThread("tracker r", lambda: recorder)
    thread.log(0, {"loss": 0.5, "kl": math.nan})
    thread.log(1, {"loss": 0.25})
    assert list(close_all([thread], "finished")) == []
    assert recorder.rows == [(0, {"loss": 0.5}), (1, {"loss": 0.25})]
    assert recorder.outcome == "finished"


def test_the_first_error_of_a_tracker_is_logged_and_its_lost_rows_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken()
    thread = TrackerThread("tracker b", lambda: broken, folder=tmp_path)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            thread.log(step, {"loss": 0.5})
        problems = list(close_all([thread], "failed"))
    [problem] = problems
    full = rf"the disk is full: {tmp_path} cannot be written; [\d,]+ bytes are free in {tmp_path.parent}"
    assert re.fullmatch(rf"tracker b missed 2 of 5 rows \({full}\)", problem)
    assert [step for step, _ in broken.rows] == [0, 2, 4] and broken.outcome == "failed"
    assert len(caplog.records) == 1 and "tracker b failed: the disk is full" in caplog.text
    assert "The run continues." in caplog.text and "Traceback" not in caplog.text


def test_a_tracker_that_is_behind_when_the_run_ends_is_closed_with_the_outcome() -> None:
    slow = Hanging()
    thread = TrackerThread("tracker s", lambda: slow, max_waiting=2)
    while slow.waiting == 0:
        thread.log(0, {"loss": 0.5})
        time.sleep(0.01)
    for step in (1, 2, 3):
        thread.log(step, {"loss": 0.5})
    thread.finish("finished")
    slow.answered.set()
    assert "missed" in (thread.join(60) or "")
    assert slow.outcome == "finished"


@pytest.mark.parametrize("error", [ValueError("no API key"), SystemExit("login first")])
def test_a_tracker_that_cannot_be_built_loses_every_row(error: BaseException) -> None:
    def build() -> Recorder:
        raise error

    thread = TrackerThread("tracker n", build)
    thread.log(0, {"loss": 0.5})
    [problem] = close_all([thread], "finished")
    assert problem.startswith("tracker n missed 1 of 1 rows") and str(error) in problem


@pytest.mark.slow
def test_a_tracker_that_hangs_delays_neither_the_loop_nor_the_end() -> None:
    hanging, recorder = Hanging(), Recorder()
    threads = [
        TrackerThread("tracker h", lambda: hanging, max_waiting=3),
        TrackerThread("tracker r", lambda: recorder),
    ]
    started = time.monotonic()
    for step in range(10):
        for thread in threads:
            thread.log(step, {"loss": 0.5})
    problems = list(close_all(threads, "finished", timeout_s=1.0))
    assert time.monotonic() - started < 20
    assert problems == ["tracker h missed 10 of 10 rows and has not finished (TimeoutError: 3 rows are waiting for it)"]
    assert len(recorder.rows) == 10
    hanging.answered.set()


def test_a_metric_that_is_not_a_number_loses_its_row() -> None:
    recorder = Recorder()
    thread = TrackerThread("tracker r", lambda: recorder)
    thread.log(0, {"loss": "low"})  # type: ignore[dict-item]  # what a plugin may pass
    thread.log(1, {"loss": 0.5})
    [problem] = close_all([thread], "finished")
    assert "missed 1 of 2 rows (" in problem and "TypeError: must be real number" in problem
    assert [step for step, _ in recorder.rows] == [1]


def test_a_run_has_the_trackers_of_its_configuration(tmp_path: Path, install: Callable[..., Any]) -> None:
    source = """
        import slime.plugin as sp
        slime_api = 1

        @sp.hookimpl
        def slime_register_trackers():
            return [sp.TrackerSpec(name="offline", factory="tracker_impl:Offline")]
    """
    body = """
        class Offline:
            def __init__(self, options, context):
                raise ConnectionError(f"{context.run_dir.name} cannot reach the server")
            def log(self, step, metrics): pass
            def close(self, outcome): pass
    """
    install("slime-tracker-offline", "1", {"offline": "tracker_light"}, {"tracker_light": source, "tracker_impl": body})
    default = RunConfig()
    choice = type(default.components.tracker[0])  # type: ignore[attr-defined]  # fields made from the table of kinds
    chosen = default.with_options("components", tracker=[choice(name="tensorboard"), choice(name="offline")])
    out = io.StringIO()
    observer = RunObserver(chosen, tmp_path, load_plugins(chosen.plugins), file=out)
    observer.step_finished(0, {"loss": 0.5, "time/step": 1.0})
    observer.run_finished("finished")
    assert list(tmp_path.glob("events.out.tfevents.*"))
    summary = " ".join(out.getvalue().split())
    assert "tracker offline missed 1 of 1 rows" in summary and "cannot reach the server" in summary


def test_a_run_without_trackers_writes_its_metrics_and_nothing_else(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text('[[tracker]]\nname = "tensorboard"\n[[tracker]]\nname = "mlflow"\n')
    config = read_config([str(run_file), "--tracker", "none"])
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    observer = RunObserver(config, run_dir, load_plugins(config.plugins), file=io.StringIO())
    observer.step_finished(0, {"loss": 0.5})
    observer.run_finished("finished")
    assert sorted(file.name for file in run_dir.iterdir()) == ["logs", "metrics.jsonl", "report.html"]
