"""Evaluations during training: training continues, and the next weight sync waits for the evaluation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime import loop
from slime.config import RunConfig
from slime.config.eval_options import EvalOptions
from slime.config.options import RolloutOptions
from slime.config.weight_options import CheckpointOptions
from slime.errors import PreemptedError
from slime.registry.plugin_set import load_plugins
from slime.rollout.evaluation import EvalReport
from slime.run.rollout_process import RolloutProcess
from slime.run.run import Run


class Reports:
    """An observer that records the reported evaluations among the other events."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def eval_finished(self, step: int, report: EvalReport, _: dict[int, int]) -> None:
        self._events.append(f"report {step}")
        assert report.rollout == step


class PendingEvaluation:
    """A fake call to the rollout process; it has finished when `over` is set."""

    def __init__(self, number: int, rollouts: Rollouts) -> None:
        self.number = number
        self._rollouts = rollouts

    @property
    def finished(self) -> bool:
        return self._rollouts.over


class Rollouts:
    """A fake handle on the rollout process."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self.over = False

    def begin(self, method: object, number: Any, *, doing: str) -> Any:
        if method == RolloutProcess.weights_added:
            assert doing == "announcing weights to the rollout process"
            assert len(number) == 1
            return SimpleNamespace(wait=lambda: None)
        assert (method, doing) == (RolloutProcess.evaluate, f"evaluating after {number} rollouts")
        self._events.append(f"evaluation {number}")
        return PendingEvaluation(number, self)


def run_with(events: list[str], tmp_path: Path) -> tuple[Any, Rollouts]:
    config = RunConfig(
        rollout=RolloutOptions(num_rollout=4, update_weights_interval=2),
        evaluation=EvalOptions(eval_prompt_data=[("a", "f")], eval_interval=4),
    )
    run: Any = Run(config, tmp_path, load_plugins(config.plugins), Reports(events))
    rollouts = Rollouts(events)
    run._rollout = rollouts
    run._wait_rollout = lambda pending, _: EvalReport(pending.number, {})
    run._trainer = SimpleNamespace(begin=lambda *_, **__: SimpleNamespace(wait=lambda: [events.append("sync") or {}]))
    run.start_generation = lambda _number: None
    run.wait_generation = lambda number: number
    run.train = lambda number: events.append(f"train {number}")
    run.finish_step = lambda *_: None
    run.save = run.export_hf = lambda _done: None
    return run, rollouts


def test_training_continues_during_an_evaluation_and_the_next_sync_waits(tmp_path: Path) -> None:
    events: list[str] = []
    run, _ = run_with(events, tmp_path)
    loop.train_asynchronously(run)
    assert events == [
        *("sync", "evaluation 0", "train 0", "train 1"),
        *("report 0", "sync", "train 2", "train 3", "sync"),
        *("evaluation 4", "report 4"),
    ]


def test_a_finished_evaluation_is_reported_after_the_next_step(tmp_path: Path) -> None:
    events: list[str] = []
    run, rollouts = run_with(events, tmp_path)
    rollouts.over = True
    loop.train_asynchronously(run)
    assert events[:4] == ["sync", "evaluation 0", "train 0", "report 0"]


def test_only_one_evaluation_runs_at_a_time(tmp_path: Path) -> None:
    events: list[str] = []
    run, _ = run_with(events, tmp_path)
    run.start_evaluation(1)
    run.start_evaluation(2)
    assert events == ["evaluation 1", "report 1", "evaluation 2"]


def saving_run(events: list[str], tmp_path: Path) -> Any:
    """A run that is evaluated after two rollouts and saved after three, with no weight sync in between."""
    run, _ = run_with(events, tmp_path)
    rollout = run.config.rollout.model_copy(update={"update_weights_interval": 4})
    evaluation = run.config.evaluation.model_copy(update={"eval_interval": 2, "skip_eval_before_train": True})
    checkpoint = CheckpointOptions(save="ckpt", save_interval=3)
    run.config = run.config.model_copy(update={"rollout": rollout, "evaluation": evaluation, "checkpoint": checkpoint})
    run.save = lambda done: events.append(f"save {done}")
    return run


def test_a_checkpoint_waits_for_the_evaluation_of_earlier_weights(tmp_path: Path) -> None:
    events: list[str] = []
    loop.train_asynchronously(saving_run(events, tmp_path))
    assert events[4:8] == ["evaluation 2", "train 2", "report 2", "save 3"]
    assert events[-3:] == ["evaluation 4", "save 4", "report 4"]


def test_a_preempted_run_saves_and_then_finishes_the_evaluation_of_earlier_weights(tmp_path: Path) -> None:
    events: list[str] = []
    run = saving_run(events, tmp_path)
    run._preemption = SimpleNamespace(asked=False)

    def train(number: int) -> None:
        events.append(f"train {number}")
        run._preemption.asked = number == 2

    run.train = train
    with pytest.raises(PreemptedError, match="after 3 rollouts"):
        loop.train_asynchronously(run)
    assert events[4:] == ["evaluation 2", "train 2", "save 3", "report 2"]


def test_an_error_of_an_evaluation_is_raised_by_the_wait_for_it(tmp_path: Path) -> None:
    run, _ = run_with([], tmp_path)

    def failing(*_: object) -> EvalReport:
        raise ValueError("none of its samples has a reward")

    run._wait_rollout = failing
    run.start_evaluation(1)
    with pytest.raises(ValueError, match="none of its samples"):
        run.sync_weights()
