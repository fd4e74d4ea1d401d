"""What a rank does with weights and checkpoints, without a model, engines or other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.harness import make_config

from slime.train import rank as module
from slime.train.rank import MegatronRank


class Transport:
    """Records what it is told."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[str]]] = []
        self.closed = 0

    def send(self, named: Iterator[tuple[str, torch.Tensor]], *, version: str) -> None:
        self.sent.append((version, [name for name, _ in named]))

    def close(self) -> None:
        self.closed += 1


class Part:
    """Policy, critic or reference: records what happens to it."""

    def __init__(self, name: str, calls: list[tuple[str, ...]]) -> None:
        self.name, self.calls = name, calls

    def finish_param_gather(self) -> None:
        """Nothing is being gathered."""

    def check(self, folder: Path) -> None:
        self.calls.append((self.name, "checked", folder.name))

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        self.calls.append((self.name, "weights" if weights_only else "everything", folder.name))

    def renew(self) -> None:
        self.calls.append((self.name, "renewed"))


class OneRank(MegatronRank):
    """Rank `number` of a run, without a model: its weights have two names."""

    def __init__(self, number: int, run_dir: Path) -> None:
        self.config = make_config(run_dir / "model")
        self._rank, self._run_dir, self._transport = number, run_dir, None
        self.gathered: list[str] = []
        self.policy: Any = Part("policy", calls := list[tuple[str, ...]]())
        self.critic: Any = Part("critic", calls)
        self.reference: Any = Part("reference", calls)
        self.calls = calls

    def named_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b"):
            self.gathered.append(name)
            yield name, torch.zeros(1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Transport]:
    """The transports that ranks make."""
    made: list[Transport] = []

    def create(*_: Any, **__: Any) -> Transport:
        made.append(Transport())
        return made[-1]

    monkeypatch.setattr(module, "create_transport", create)
    return made


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The calls that leave the process groups: whether after an error."""
    calls: list[bool] = []
    monkeypatch.setattr(module.parallel, "stop", lambda *, failed: calls.append(failed))
    return calls


@pytest.mark.parametrize("number", [0, 1])
def test_every_rank_gathers_and_the_first_sends(number: int, made: list[Transport], tmp_path: Path) -> None:
    rank = OneRank(number, tmp_path)
    for version in ("1", "2"):
        rank.sync_weights(["http://127.0.0.1:1"], None, 1, version)
    assert rank.gathered == ["a", "b"] * 2
    sent = [[("1", ["a", "b"]), ("2", ["a", "b"])]] if number == 0 else []  # over one connection
    assert [transport.sent for transport in made] == sent


def test_a_rank_disconnects_from_the_engines_when_it_ends(
    made: list[Transport], stopped: list[bool], tmp_path: Path
) -> None:
    rank = OneRank(0, tmp_path)
    rank.sync_weights(["http://127.0.0.1:1"], None, 1, "1")
    rank.close()
    assert made[0].closed == 1
    assert stopped == [False]


def test_a_rank_leaves_the_process_groups_even_if_the_engines_are_gone(
    made: list[Transport], stopped: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: Transport) -> None:
        raise ConnectionError

    monkeypatch.setattr(Transport, "close", gone)
    rank = OneRank(0, tmp_path)
    rank.sync_weights(["http://127.0.0.1:1"], None, 1, "1")
    with pytest.raises(ConnectionError):
        rank.close(failed=True)
    assert len(made) == 1
    assert stopped == [True]


def test_a_resumed_rank_takes_everything_back_after_the_critic_was_found(tmp_path: Path) -> None:
    rank = OneRank(0, tmp_path)
    rank.load(tmp_path / "state")
    assert rank.calls == [
        ("critic", "checked", "state"),
        ("reference", "everything", "reference"),
        ("policy", "everything", "state"),
        ("critic", "everything", "state"),
    ]


@pytest.mark.parametrize("own_reference", [False, True])
def test_a_new_run_from_a_checkpoint_takes_only_weights(own_reference: bool, tmp_path: Path) -> None:
    rank = OneRank(0, tmp_path)
    if own_reference:
        rank.config = make_config(tmp_path / "model", ref_load=str(tmp_path / "reference"), use_kl_loss=True)
    rank.load(tmp_path / "state", weights_only=True)
    renewed = [] if own_reference else [("reference", "renewed")]  # after the policy has its weights
    assert rank.calls == [("policy", "weights", "state"), *renewed, ("critic", "weights", "state")]
