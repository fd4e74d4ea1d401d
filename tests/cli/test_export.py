"""`slime export` up to the start of processes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.cli.conftest import Slime
from tests.cli.test_eval import checkpoint

__all__ = ["checkpoint"]


class Loop(ModuleType):
    """Replaces the loop, which imports Ray."""

    def __init__(self) -> None:
        super().__init__("slime.loop")
        self.calls: list[tuple[Any, ...]] = []

    def export(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        return 0


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    import slime

    module = Loop()
    monkeypatch.setitem(sys.modules, "slime.loop", module)
    monkeypatch.setattr(slime, "loop", module, raising=False)
    return module


def test_the_weights_of_the_newest_checkpoint_are_exported_without_estimator_or_data(
    slime: Slime, loop: Loop, checkpoint: Path, tmp_path: Path
) -> None:
    ended = slime("export", str(checkpoint), str(tmp_path / "model"), "--device", "cpu", "--run-name", "e")
    assert ended.code == 0, ended.err
    [(config, run_dir, _, folder)] = loop.calls
    assert (run_dir, folder) == (Path("outputs/e"), tmp_path / "model")
    assert Path(config.checkpoint.initial_megatron_checkpoint).resolve() == (checkpoint / "rollout_000002").resolve()
    assert (config.algorithm.loss_type, config.data.prompt_data, config.checkpoint.save) == ("sft_loss", [], None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "got nothing, expected CHECKPOINT DIR"),
        (["--load", "saved"], "expected CHECKPOINT DIR"),
        (["absent", "model"], "absent"),
    ],
)
def test_a_folder_without_a_checkpoint_is_refused(slime: Slime, loop: Loop, words: list[str], message: str) -> None:
    ended = slime("export", *words)
    assert ended.code == 2 and message in ended.err
    assert loop.calls == []


def test_a_model_folder_is_not_a_checkpoint(slime: Slime, loop: Loop, described_model: Path, tmp_path: Path) -> None:
    ended = slime("export", str(described_model), str(tmp_path / "model"))
    assert ended.code == 2 and "is not a checkpoint" in ended.err
    assert loop.calls == []


def test_a_folder_that_is_not_empty_is_left_unchanged(
    slime: Slime, loop: Loop, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()
    ended = slime("export", str(checkpoint), str(tmp_path / "model"))
    assert ended.code == 2 and "is not an empty folder" in ended.err
    assert loop.calls == []


def test_help_describes_the_arguments(slime: Slime) -> None:
    assert slime("export", "--help").out.startswith("usage: slime export CHECKPOINT DIR")
