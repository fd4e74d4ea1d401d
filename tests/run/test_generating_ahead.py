"""How far the asynchronous loop generates ahead: up to the buffer's size, and within the bound of staleness."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime import loop
from slime.config import RunConfig
from slime.config.options import RolloutOptions
from slime.errors import SlimeError
from slime.registry.plugin_set import load_plugins
from slime.run.rollout_process import RolloutProcess
from slime.run.run import Run

ROLLOUTS = 12


class Driven:
    """The real loop and driver, with stubs of the processes; records when each rollout was begun."""

    def __init__(self, tmp_path: Path, first: int = 0, **options: Any) -> None:
        config = RunConfig(rollout=RolloutOptions(num_rollout=ROLLOUTS, **{"async": True}, **options))
        self.run: Any = Run(config, tmp_path, load_plugins(config.plugins), SimpleNamespace())  # type: ignore[arg-type]
        self.run.first_rollout = self.run._rollouts_trained = first
        #: rollout -> rollouts that the engines' weights had been trained on
        self.begun_with: dict[int, int] = {}
        #: for each rollout trained on, how many others were begun
        self.ahead: list[int] = []
        self.run._rollout = SimpleNamespace(begin=lambda *_, **__: SimpleNamespace(wait=lambda: None))
        self.run._trainer = SimpleNamespace(begin=lambda *_, **__: SimpleNamespace(wait=lambda: [{}]))
        self.run.start_generation = self._begin
        self.run.wait_generation = lambda number: number
        self.run.train = self._train
        self.run.finish_step = lambda *_: None
        loop.train_asynchronously(self.run)

    def _begin(self, number: int) -> None:
        self.begun_with[number] = self.run._trained_at[self.run._weight_version]

    def _train(self, number: int) -> None:
        assert number in self.begun_with
        self.ahead.append(len(self.begun_with) - 1 - (number - self.run.first_rollout))
        self.run._rollouts_trained += 1

    @property
    def staleness(self) -> list[int]:
        return [number - trained for number, trained in self.begun_with.items()]


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("buffer", [1, 2, 4])
def test_without_a_bound_the_staleness_is_the_buffer_and_the_interval(
    buffer: int, interval: int, tmp_path: Path
) -> None:
    driven = Driven(tmp_path, async_buffer_size=buffer, update_weights_interval=interval)
    assert max(driven.staleness) == buffer + interval - 1
    assert max(driven.ahead) == buffer


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 6])
@pytest.mark.parametrize(("buffer", "interval"), [(1, 1), (4, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("bound", [0, 1, 2, 3, 9])
def test_generation_waits_for_weights_within_the_bound(
    bound: int, buffer: int, interval: int, first: int, tmp_path: Path
) -> None:
    bound = max(bound, interval - 1)  # less is refused: see tests/config
    sizes = {"async_buffer_size": buffer, "update_weights_interval": interval}
    driven = Driven(tmp_path, first, max_staleness=bound, **sizes)
    assert list(driven.begun_with) == list(range(first, ROLLOUTS))
    most = min(bound, buffer + interval - 1)
    assert most - (first > 0) <= max(driven.staleness) <= most  # few steps are left to one that is resumed
    assert max(driven.ahead) == min(bound, buffer)


@pytest.mark.parametrize(
    ("newest_trained_at", "first_sync"),
    [(4, {3: 4}), (3, {4: 4})],
    ids=["the engines had the saved weights", "the engines had older weights"],
)
def test_a_resumed_run_tells_the_rollout_process_the_ages_of_the_saved_versions(
    tmp_path: Path, newest_trained_at: int, first_sync: dict[int, int]
) -> None:
    config = RunConfig()
    saved_ages = {1: 0, 2: 2, 3: newest_trained_at}
    run: Any = Run(config, tmp_path, load_plugins(config.plugins), SimpleNamespace(resumed=lambda *_: None))  # type: ignore[arg-type]
    calls: list[tuple[Any, ...]] = []
    waited = SimpleNamespace(wait=lambda: calls.append(("known",)))
    run._rollout = SimpleNamespace(begin=lambda *call, **_: calls.append(call) or waited)
    run._trainer = SimpleNamespace(begin=lambda *_, **__: SimpleNamespace(wait=lambda: [{}]))
    saved = {"trainer_part": tmp_path, "rollout_part": tmp_path, "path": tmp_path, "rollouts_done": 4}
    run._load(SimpleNamespace(**saved, weight_version=3, trained_at=saved_ages))
    run.sync_weights()
    known = ("known",)
    added = ((RolloutProcess.weights_added, ages) for ages in (saved_ages, first_sync))
    assert calls == [(RolloutProcess.load, tmp_path), known, next(added), known, next(added), known]


def run_without_processes(tmp_path: Path) -> Any:
    config, observer = RunConfig(), SimpleNamespace()
    return Run(config, tmp_path, load_plugins(config.plugins), observer)  # type: ignore[arg-type]  # nothing is observed


@pytest.mark.parametrize("generating", [True, False])
def test_the_rollout_process_knows_a_version_before_samples_of_it_can_be_finished(
    tmp_path: Path, generating: bool
) -> None:
    run, events = run_without_processes(tmp_path), list[str]()
    announced = SimpleNamespace(wait=lambda: events.append("known"))
    run._rollout = SimpleNamespace(begin=lambda *_, **__: events.append("announced") or announced)
    run._trainer = SimpleNamespace(begin=lambda *_, **__: SimpleNamespace(wait=lambda: [events.append("sent") or {}]))
    run._generating = {0: "in flight"} if generating else {}
    run.sync_weights()
    # Where nothing is generated, both go on at the same time; the next rollout begins after both.
    assert events[:3] == (["announced", "known", "sent"] if generating else ["announced", "sent", "known"])


def test_newer_weights_for_restarted_engines_are_known_before_they_are_sent(tmp_path: Path) -> None:
    run, events = run_without_processes(tmp_path), list[str]()
    announced = SimpleNamespace(wait=lambda: events.append("known"))
    run._rollout = SimpleNamespace(begin=lambda *_, **__: events.append("announced") or announced)
    run._trainer = SimpleNamespace(begin=lambda *_, **__: SimpleNamespace(wait=lambda: [events.append("sent") or {}]))
    run._trained_at, run._rollouts_trained = {0: 0}, 1
    run._catch_up(evaluating=False)
    assert events == ["announced", "known", "sent"]


def test_a_rollout_process_that_does_not_get_a_version_ends_the_run(tmp_path: Path) -> None:
    run = run_without_processes(tmp_path)

    def fail() -> None:
        raise SlimeError("lost")

    run._rollout = SimpleNamespace(begin=lambda *_, **__: SimpleNamespace(wait=fail))
    run._trainer = SimpleNamespace(begin=lambda *_, **__: SimpleNamespace(wait=lambda: [{}]))
    with pytest.raises(SlimeError, match="lost"):
        run.sync_weights()
