"""Events of the loop reach every sink, and no sink can stop the run."""

from __future__ import annotations

import io
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slime.config.options import RolloutOptions, RunOptions
from slime.config.run_config import RunConfig
from slime.errors import ClusterError, EngineError
from slime.observe.metrics import MetricsWriter, read_metrics
from slime.observe.observer import RunObserver
from slime.registry.plugin_set import PluginSet, load_plugins
from slime.rollout.record import Rollout
from slime.types import Sample

CONFIG = RunConfig(
    run=RunOptions(log_samples_interval=2),
    rollout=RolloutOptions(num_rollout=3, rollout_batch_size=2, n_samples_per_prompt=4),
)
STEP = {
    "rollout/reward_mean": 0.5,
    "loss": 0.25,
    "weight_version": 2.0,
    "time/engine": 1.0,
    "time/forward_backward": 0.8,
    "time/step": 2.0,
}
EXAMPLE = Sample(prompt="1+1=", label="2", response="3", reward=0.0)


@dataclass(frozen=True)
class Report:
    """An evaluation's result."""

    metrics: Mapping[str, float]
    failures: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    seconds: float = 1.0
    weight_versions: list[str] = field(default_factory=list)


class RecordingObservers:
    """A fake of the plugins' observer hooks that records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.failures: Counter[tuple[str, str]] = Counter()

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        self.calls.append((hook, arguments))
        return [{"page.html": "what a plugin made of the run"}] if hook == "slime_run_closed" else []


def observe(run_dir: Path) -> tuple[RunObserver, io.StringIO, RecordingObservers]:
    recording = RecordingObservers()
    plugins: PluginSet = load_plugins(CONFIG.plugins)
    object.__setattr__(plugins, "observe", recording.call)
    object.__setattr__(plugins, "observer_failures", recording.failures)
    out = io.StringIO()
    return RunObserver(CONFIG, run_dir, plugins, file=out), out, recording


def test_a_run_reaches_file_tensorboard_terminal_pictures_and_plugins(tmp_path: Path) -> None:
    observer, out, recording = observe(tmp_path)
    observer.run_started(CONFIG, tmp_path)
    observer.eval_finished(0, Report({"eval/held": 0.25, "eval/held/samples": 8.0}), {})
    for step in range(3):
        observer.progress("generating", 4, 8)
        metrics = {"rollout/samples": 8.0, "rollout/failed": 1.0}
        observer.rollout_finished(Rollout(step, metrics=metrics, examples=[EXAMPLE], failures=["1x reward r: bad"]))
        observer.step_finished(step, STEP)
    observer.checkpoint_saved(3, tmp_path / "ckpt")
    observer.model_exported(tmp_path / "hf-export")
    observer.run_finished("finished")

    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (rows[0]["eval/held"], rows[0]["train/loss"], rows[0]["weight_version"]) == (0.25, 0.25, 2.0)
    assert rows[0]["time/kernel_overhead"] == pytest.approx(0.1)
    assert list(tmp_path.glob("events.out.tfevents.*"))

    text = out.getvalue()
    assert "3 rollouts of 2 prompts x 4 samples" in text
    assert text.count("a sample of rollout") == 2  # rollouts 0 and 2
    assert "rollout 1: 1 of 8 samples failed or were aborted: 1x reward r: bad" in text
    assert "eval after 0 rollouts  1.0 s\n  set     mean  samples\n  held  0.2500        8" in text
    assert "checkpoint after 3 rollouts" in text and "hf-export" in text
    assert "finished  3 steps" in text and "GiB" in text and "kernel overhead 10.0% of a step" in text

    hooks = [hook for hook, _ in recording.calls]
    assert hooks == [
        "slime_run_started",
        *["slime_step_finished"] * 3,
        "slime_checkpoint_saved",
        "slime_run_finished",
        "slime_run_closed",
    ]
    assert recording.calls[1][1]["metrics"]["train/loss"] == 0.25
    assert recording.calls[-2][1] == {"run_dir": tmp_path, "outcome": "finished"}
    assert f"  {'page.html':<22}what a plugin made of the run" in text


def test_the_loss_of_a_node_whose_engine_was_missed_first_is_one_restart(tmp_path: Path) -> None:
    for error, counted in ((ClusterError("node 10.0.0.2 has ended"), 2), (EngineError("engine 1 did not start"), 3)):
        observer, _, _ = observe(tmp_path)
        for engine in range(2):
            observer.part_lost("engine", f"engine {engine}", "it has ended")
        observer.part_back("engine 0", 1.0, 0)
        observer.ending(error)
        observer.restarting("it", None)
        assert observer.restarts.total() == counted
        observer.run_finished("failed")


def test_a_restarted_run_says_how_long_its_own_start_took(tmp_path: Path) -> None:
    observer, out, _ = observe(tmp_path)
    observer._started -= 5000.0  # as if it had run so long
    observer._attempt_started -= 5000.0
    observer.restarting("it", None)
    observer.run_started(observer._config, tmp_path)
    observer.run_finished("finished")
    ready, ended = (
        re.search(rf"{words} ([\d.]+) s", " ".join(out.getvalue().split())) for words in ("after", "steps,")
    )
    assert ready is not None and float(ready[1]) < 1000.0
    assert ended is not None and float(ended[1]) >= 5000.0


def test_restarts_are_lines_metrics_and_a_fact_of_the_end(tmp_path: Path) -> None:
    observer, out, _ = observe(tmp_path)
    observer.part_lost("engine", "engine 1", "engine 1's scheduler (pid 7) has ended.\nLast lines of x.log:\noops")
    observer.part_back("engine 1", 13.21, 1)
    observer.part_lost("router", "the router", "router: was killed. Last lines of router.log:\nend")
    observer.part_back("the router", 0.5, 5)
    observer.step_finished(0, STEP)
    observer.step_finished(1, STEP)
    observer.run_finished("finished")
    first, second = read_metrics(tmp_path)
    assert {name: first[name] for name in first if "restart" in name} == {
        "restarts/engine": 1.0,
        "restarts/router": 1.0,
        "restarts/seconds": pytest.approx(13.71),
    }
    assert not any("restart" in name for name in second)
    text = out.getvalue()
    assert "restarting engine 1 (1 of 3 restarts): engine 1's scheduler (pid 7) has ended.\n" in text
    assert "engine 1 is back after 13.2 s, 1 request repeated\n" in text
    assert "restarting the router (2 of 3 restarts): router: was killed.\n" in text
    assert "the router is back after 0.5 s, 5 requests repeated\n" in text
    assert "restarted: 1 engine, 1 router" in text
    log = (tmp_path / "logs" / "driver.log").read_text()
    assert "Last lines of x.log:\noops" in log and "engine 1 is back" in log


def test_a_sink_that_cannot_write_is_reported_once_and_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full_disk(_self: MetricsWriter, step: int, metrics: Mapping[str, float]) -> None:
        raise OSError(28, f"No space left on device at step {step} with {len(metrics)} metrics")

    observer, out, _ = observe(tmp_path)
    monkeypatch.setattr(MetricsWriter, "write", full_disk)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            observer.step_finished(step, STEP)
        observer.run_finished("finished")
    reported = [record.message for record in caplog.records if "metrics.jsonl cannot be written" in record.message]
    assert len(reported) == 1 and "the disk is full: " in reported[0]
    assert out.getvalue().count("0.5000") >= 3


def test_a_run_that_fails_before_its_first_step_closes_everything(tmp_path: Path) -> None:
    observer, out, recording = observe(tmp_path)
    observer.run_finished("failed")
    assert out.getvalue().startswith("failed  0 steps")
    assert recording.calls[0] == ("slime_run_finished", {"run_dir": tmp_path, "outcome": "failed"})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_run_on_an_existing_cluster_does_not_show_the_memory_of_the_driver_alone(tmp_path: Path) -> None:
    out = io.StringIO()
    config = CONFIG.with_options("cluster", ray_address="10.0.0.1:6379")
    RunObserver(config, tmp_path, file=out).run_finished("finished")
    assert out.getvalue().startswith("finished  0 steps") and "GiB" not in out.getvalue()


def test_a_metric_that_is_not_a_number_does_not_stop_the_run(tmp_path: Path) -> None:
    observer, _, _ = observe(tmp_path)
    observer.step_finished(0, {**STEP, "loss": "high"})  # type: ignore[dict-item]  # the fault under test
    observer.step_finished(1, STEP)
    observer.run_finished("finished")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1]


def test_errors_of_observer_hooks_are_counted_in_the_summary(tmp_path: Path) -> None:
    observer, out, recording = observe(tmp_path)
    recording.failures["wandb", "slime_step_finished"] = 12
    observer.run_finished("finished")
    assert "warning: errors in slime_step_finished() of plugin wandb: 12" in out.getvalue()


def test_findings_of_the_passive_checks_are_shown(tmp_path: Path) -> None:
    observer, out, _ = observe(tmp_path)
    observer.run_started(CONFIG, tmp_path)
    observer.rollout_finished(Rollout(2, findings=["reward r gave 1, then 2"]))
    assert "warning: rollout 2: reward r gave 1, then 2" in out.getvalue()


def test_lost_samples_of_an_evaluation_are_counted_once(tmp_path: Path) -> None:
    observer, out, _ = observe(tmp_path)
    counts = {"eval/a": 0.5, "eval/a/samples": 8.0, "eval/a/failed": 2.0, "eval/a/aborted": 1.0, "eval/b": 1.0,
              "eval/b/samples": 4.0, "eval/plugin/reward/x/failed": 2.0}  # fmt: skip
    observer.eval_finished(0, Report(counts, failures=["2x reward x: bad"]), {})
    assert "warning: evaluation: 3 of 12 samples failed or were aborted: 2x reward x: bad" in out.getvalue()


def test_an_evaluation_that_other_weights_have_answered_says_so(tmp_path: Path) -> None:
    observer, out, _ = observe(tmp_path)
    trained_at = {5: 4, 6: 4, 7: 6}
    observer.eval_finished(4, Report({"eval/held": 0.5}, weight_versions=["6"]), trained_at)
    assert "warning" not in out.getvalue()
    observer.eval_finished(4, Report({"eval/held": 0.5}, weight_versions=["7"]), trained_at)
    told = "warning: evaluation after 4 rollouts: the engines answered with weights of versions "
    assert f"{told}7; those after 4 rollouts are 5, 6" in out.getvalue()
    observer.eval_finished(4, Report({"eval/held": 0.5}, weight_versions=["6", "7"]), trained_at)
    assert f"{told}6, 7; those" in out.getvalue()
