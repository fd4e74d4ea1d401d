"""The look at the nodes when a run has joined a cluster: whom it refuses, and what it costs a run on one node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from slime.config import RunConfig, read_config, resolve
from slime.errors import ClusterError, ConfigError
from slime_launch import start_check
from slime_launch.cluster_problems import Problem
from slime_launch.node_facts import Inspector, Question, Seen


class FakeNodes:
    """Ray's nodes n0 (this one), n1, ...; each but this one answers with what this one sees, or a fault."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: Sequence[int]) -> None:
        self.nodes = [
            {
                "NodeID": f"n{number}",
                "NodeName": f"n{number}",
                "NodeManagerHostname": f"n{number}",
                "NodeManagerAddress": f"10.0.0.{number}",
                "Alive": True,
                "Resources": {"CPU": float(count)} if count else {},
            }
            for number, count in enumerate(devices)
        ]
        #: node -> what it sees otherwise; None does not answer
        self.faults: dict[str, dict[str, Any] | None] = {}
        self.asked: list[str] = []
        context = SimpleNamespace(get_node_id=lambda: "n0")
        monkeypatch.setattr(ray, "nodes", lambda: self.nodes)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(start_check, "Asked", lambda nodes, _: SimpleNamespace(answers=self._answers(nodes)))

    def _answers(self, nodes: Sequence[dict[str, Any]]) -> Any:
        def answers(
            call: str, questions: Sequence[Question], problems: list[Problem]
        ) -> Iterator[tuple[dict[str, Any], None, Seen]]:
            assert call == "seen"
            for node, question in zip(nodes, questions, strict=True):
                self.asked.append(node["NodeID"])
                if (fault := self.faults.get(node["NodeID"], {})) is None:
                    problems.append(Problem(node["NodeID"], "it has not answered for 60 s", "Read Ray's logs there"))
                else:
                    yield node, None, replace(Inspector().seen(question), **fault)

        return answers


@pytest.fixture
def config(run_file: Path) -> RunConfig:
    """A run of two ranks and two engines, which share two CPUs."""
    flags = ["--device", "cpu", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2", "--ray-address", "auto"]
    return resolve(read_config([str(run_file), *flags]))


def test_nodes_that_are_right_are_asked_once_and_nothing_is_left(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeNodes(monkeypatch, [1, 1, 0])
    start_check.check_nodes(config, tmp_path)
    assert fake.asked == ["n1"]  # no process of the run can be on a node without devices
    assert [*tmp_path.glob(".cluster-check-*")] == [] and caplog.text == ""


def test_a_run_on_one_node_asks_nobody(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNodes(monkeypatch, [2])
    start_check.check_nodes(config, tmp_path / "not even looked at")
    assert fake.asked == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"canary": ""}, "n1 (10.0.0.1): it does not see what this machine writes to"),
        ({"versions": {"torch": "2.8"}}, "n1 (10.0.0.1): torch 2.8 there, 2.9 here. Install the same versions"),
    ],
)
def test_a_run_that_needs_a_node_that_is_not_right_is_refused(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], said: str
) -> None:
    fake = FakeNodes(monkeypatch, [1, 1])
    fake.faults["n1"] = fault
    monkeypatch.setattr("slime_launch.node_facts._versions", lambda **_: {"torch": "2.9"})
    with pytest.raises(ConfigError, match="nodes that the run needs are not ready for it") as caught:
        start_check.check_nodes(config, tmp_path)
    assert said in str(caught.value)
    assert [*tmp_path.glob(".cluster-check-*")] == []


def test_if_the_others_are_enough_it_is_a_warning(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeNodes(monkeypatch, [1, 1, 1])
    fake.faults["n2"] = {"canary": "old"}
    start_check.check_nodes(config, tmp_path)
    assert "the run may be placed on nodes that are not ready for it:\n  n2 (10.0.0.2): it does not" in caplog.text


def test_a_node_that_does_not_answer_is_lost_and_the_run_may_be_tried_again(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeNodes(monkeypatch, [1, 1])
    fake.faults["n1"] = None
    with pytest.raises(ClusterError, match="n1: it has not answered for 60 s"):
        start_check.check_nodes(config, tmp_path)
