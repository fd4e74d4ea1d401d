"""Which devices colocated engines get, and whose turn it is, without processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.config.options import ClusterOptions
from slime.run import colocation
from slime.run.colocation import AFTER_SENDING, BEFORE_SENDING, TO_TRAINER, ColocatedRun
from slime.run.placement import Placement, engines_on_ranks
from slime.run.supervise.watch import RunWatch


@pytest.mark.parametrize(
    ("nodes", "engines", "per_engine", "expected"),
    [
        ("aaaa", 4, 1, [[[0]], [[1]], [[2]], [[3]]]),
        ("aaaa", 2, 2, [[[0, 1]], [[2, 3]]]),
        ("aaaa", 1, 2, [[[0, 1]]]),
        ("aaabbb", 2, 2, [[[0, 1]], [[3, 4]]]),
        ("aaabbb", 3, 2, None),
        ("aabb", 1, 4, [[[0, 1], [2, 3]]]),
        ("abcd", 2, 2, [[[0], [1]], [[2], [3]]]),
        ("aabb", 2, 4, None),
        ("aab", 1, 3, None),
        ("aabb", 1, 3, None),
        ("aa", 0, 1, []),
    ],
)
@pytest.mark.row("L4")
def test_an_engine_runs_on_adjacent_ranks_of_one_node_or_on_all_of_several(
    nodes: str, engines: int, per_engine: int, expected: list[list[list[int]]] | None
) -> None:
    assert engines_on_ranks(nodes, engines, per_engine) == expected


class Recorder:
    """Stands for the engines and the trainer's processes: records what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.visible: Sequence[Sequence[str]] = ()

    def start(self, placement: Any, devices: Sequence[Sequence[str]], *, nodes: int) -> None:  # noqa: ARG002
        self.visible = devices

    def devices(self) -> list[str]:
        return ["4", "5", "6", "7"]

    def release_memory(self, kinds: Sequence[str]) -> None:
        self.calls.append(f"the engines released {', '.join(kinds)}")

    def restore_memory(self, kinds: Sequence[str]) -> None:
        self.calls.append(f"the engines restored {', '.join(kinds)}")

    def begin(self, method: str, *args: Any, doing: str) -> Any:  # noqa: ARG002
        if method == "held_bytes":
            return SimpleNamespace(wait=lambda: [100])
        verb = method.removesuffix("_memory")
        self.calls.append(f"the trainer {verb}d {', '.join(args[0])}" if args else method)
        return SimpleNamespace(wait=lambda: [{}])

    def held_bytes(self) -> int:
        return 1000


class Turns(ColocatedRun):
    """A run without processes."""

    def __init__(
        self, recorder: Any, *, shares: bool = True, transport: str = "tensor", train: bool = True, rollout: bool = True
    ) -> None:
        sync, cluster = SimpleNamespace(update_weight_transport=transport), ClusterOptions()
        cluster = cluster.model_copy(update={"offload_train": train, "offload_rollout": rollout})
        self.config: Any = SimpleNamespace(on_gpu=False, sync=sync, cluster=cluster, num_rollout=None)
        self._shares, self._turn, self._of_turns = shares, "trainer", defaultdict(float)
        self._seconds, self._synced, self._weight_version = {}, {}, 0
        self._engines = self._trainer = recorder
        self._profiles = None
        self._saver: Any = None
        self.reported: list[dict[str, float]] = []
        self.observer: Any = SimpleNamespace(step_finished=lambda _, metrics: self.reported.append(metrics))
        self._retention: Any = SimpleNamespace(step_finished=lambda *_: None)
        self._token_log: Any = SimpleNamespace(finish=lambda: None)
        self._watch = RunWatch(20.0)

    def _send_weights(self) -> None:
        self._trainer.begin("weights sent", doing="").wait()
        self._synced["synced_bytes"] = 10.0


def test_each_turn_goes_through_its_stages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    base = colocation.Run
    for step in ("start_generation", "start_evaluation", "train", "_save", "export_hf"):
        monkeypatch.setattr(base, step, lambda run, *_, step=step: run._trainer.calls.append(step))
    run = Turns(recorder := Recorder())
    run._saver = SimpleNamespace(newest_done=None)
    run.start_evaluation(0)
    run.start_generation(0)
    run.train(None)  # type: ignore[arg-type]  # it is not looked at
    run.save(1)
    run.export_hf(Path("model"))
    run.start_generation(1)
    to_engines = [*map(str, BEFORE_SENDING), "weights sent", *map(str, AFTER_SENDING)]
    to_trainer = [*map(str, TO_TRAINER)]
    assert recorder.calls == [
        *(*to_engines, "start_evaluation", "start_generation"),
        *(*to_trainer, "train", "_save", "export_hf"),
        *(*to_engines, "start_generation"),
    ]


@pytest.mark.parametrize("kept", ["trainer", "engines", "both"])
@pytest.mark.row("L3")
def test_the_memory_of_a_side_that_is_kept_is_not_touched(kept: str) -> None:
    run = Turns(recorder := Recorder(), train=kept == "engines", rollout=kept == "trainer")
    run._give_to_engines()
    run._give_to_trainer()
    stages = [*BEFORE_SENDING, "weights sent", *AFTER_SENDING, *TO_TRAINER]
    sides = {"trainer", "engines"} if kept == "both" else {kept}
    assert recorder.calls == [str(one) for one in stages if isinstance(one, str) or one.side not in sides]


@pytest.mark.parametrize("saver", [None, SimpleNamespace(newest_done=3)])
def test_a_save_that_writes_nothing_takes_no_turn(saver: Any) -> None:
    run = Turns(recorder := Recorder())
    run._saver, run._turn = saver, "engines"
    run.save(3)
    assert recorder.calls == []


def test_turns_between_two_steps_are_reported_with_the_second() -> None:
    run = Turns(Recorder())
    rollout: Any = SimpleNamespace(number=0, metrics={})
    for between in ("once", "never"):
        run._give_to_engines()  # for an evaluation
        if between == "once":
            run._give_to_trainer()  # for a checkpoint
        run.start_step(0)
        run._give_to_engines()
        run._give_to_trainer()
        run.finish_step(rollout, {"train/loss": 1.0})
    run.start_step(1)
    run.finish_step(rollout, {})
    first, second, third = run.reported
    assert (first["synced_bytes"], second["synced_bytes"]) == (20.0, 10.0)
    turns = {
        *("memory/engines_released", "memory/trainer_released", "memory/held_training", "memory/held_generating"),
        *("time/colocate", "time/sync_weights", "synced_bytes"),
    }
    assert first.keys() == second.keys() == turns | third.keys() | {"train/loss"}
    assert not turns & third.keys()


def test_a_run_without_engines_has_no_turns() -> None:
    run = Turns(recorder := Recorder(), shares=False)
    run._give_to_engines()
    run._give_to_trainer()
    run.sync_weights()
    assert recorder.calls == []


@pytest.mark.parametrize(
    ("transport", "stages", "nodes", "visible", "beside"),
    [
        ("tensor", 1, 1, [["4", "5"], ["6", "7", "4"]], []),
        ("tensor", 2, 1, [["4", "5", "6"], ["6", "7", "4"]], []),
        ("tensor", 4, 1, [["4", "5", "6", "7"], ["6", "7", "4", "5"]], []),
        ("disk", 2, 1, [["4", "5"], ["6", "7"]], []),
        ("disk", 1, 2, [["4", "5"], ["6", "7"]], []),
        ("tensor", 2, 2, [["4", "5"], ["6", "7"]], [[0, 1], [2, 3]]),
    ],
)
def test_an_engine_sees_the_devices_of_its_ranks_and_those_whose_memory_it_opens(
    transport: str, stages: int, nodes: int, visible: list[list[str]], beside: list[list[int]]
) -> None:
    run = Turns(recorder := Recorder(), transport=transport)
    run.config.megatron = {"pipeline_model_parallel_size": stages}
    run.config.on_gpu, run._beside = True, []
    run.config.cluster = run.config.cluster.model_copy(update={"actor_num_nodes": nodes})
    run._start_engines(Placement([], [], shared=[[0, 1], [2, 3]]))
    assert (recorder.visible, run._beside) == (visible, beside)
    run._start_engines(Placement([], [], shared=[[0, 1], [2, 3]], nodes_per_engine=2))
    assert run._beside == ([[0, 1, 2, 3]] if beside else [])  # one engine, over both nodes
    run.config.on_gpu = False
    run._start_engines(Placement([], [], shared=[[0, 1], [2, 3]]))
    assert (recorder.visible, run._beside) == ([], beside)
