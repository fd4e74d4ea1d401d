"""`slime convert` up to the start of processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.cli.conftest import Loop, Slime, loop
from tests.cli.test_eval import checkpoint

__all__ = ["checkpoint", "loop"]


def with_adapters(checkpoint: Path) -> None:
    (checkpoint / "rollout_000002" / "megatron" / "adapters.json").touch()


def test_adapters_are_merged_by_training_ranks_without_estimator_or_data(
    slime: Slime, loop: Loop, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_adapters(checkpoint)
    ended = slime("convert", str(checkpoint), str(tmp_path / "model"), "--device", "cpu", "--run-name", "e")
    assert ended.code == 0, ended.err
    [(_, (config, run_dir, _, folder))] = loop.calls
    assert (run_dir, folder) == (Path("outputs/e"), tmp_path / "model")
    assert Path(config.checkpoint.initial_megatron_checkpoint).resolve() == (checkpoint / "rollout_000002").resolve()
    assert (config.algorithm.loss_type, config.data.prompt_data, config.checkpoint.save) == ("sft_loss", [], None)
    assert "--verify has no effect" in slime("convert", str(checkpoint), "other", "--verify").err
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**5))
    ended = slime("convert", str(checkpoint), str(tmp_path / "other"), "--device", "cpu", "--run-name", "f")
    assert ended.code == 1 and "100,000 are free" in ended.err
    assert len(loop.calls) == 1


def test_the_model_family_of_the_run_is_kept(slime: Slime, checkpoint: Path) -> None:
    with_adapters(checkpoint)
    ended = slime("convert", str(checkpoint), "model", "--run-name", "e", "--model-family", "qwen3")
    assert ended.code == 2 and "for model_type 'llama' slime trains Qwen3ForCausalLM" in ended.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "got nothing, expected SOURCE DIR"),
        (["--load", "saved"], "expected SOURCE DIR"),
        (["absent", "model"], "there is no folder absent"),
    ],
)
def test_a_folder_without_a_checkpoint_is_refused(slime: Slime, loop: Loop, words: list[str], message: str) -> None:
    ended = slime("convert", *words)
    assert ended.code == 2 and message in ended.err
    assert loop.calls == []


def test_of_a_model_that_is_not_quantised_there_is_nothing_to_convert(
    slime: Slime, loop: Loop, described_model: Path, tmp_path: Path
) -> None:
    ended = slime("convert", str(described_model), str(tmp_path / "model"))
    assert ended.code == 2 and "there is nothing to convert" in ended.err
    assert loop.calls == [] and not (tmp_path / "model").exists()


def test_a_model_is_not_written_into_its_own_folder(slime: Slime, described_model: Path) -> None:
    ended = slime("convert", str(described_model), str(described_model / "converted"))
    assert ended.code == 2 and "are inside each other: choose another DIR" in ended.err


@pytest.mark.slow  # imports Megatron
def test_a_checkpoint_without_weights_is_refused(slime: Slime, checkpoint: Path, tmp_path: Path) -> None:
    ended = slime("convert", str(checkpoint), str(tmp_path / "model"))
    assert ended.code == 2 and "is no complete training checkpoint (no metadata.json)" in ended.err
    assert not (tmp_path / "model").exists() and not list(tmp_path.glob(".model*"))


def test_a_folder_that_is_not_empty_is_left_unchanged(
    slime: Slime, loop: Loop, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()
    ended = slime("convert", str(checkpoint), str(tmp_path / "model"))
    assert ended.code == 2 and "is not an empty folder" in ended.err
    assert loop.calls == []


def test_help_describes_the_arguments(slime: Slime) -> None:
    assert slime("convert", "--help").out.startswith("usage: slime convert SOURCE DIR")


def test_a_checkpoint_cannot_be_made_of_a_checkpoint(slime: Slime, loop: Loop, checkpoint: Path) -> None:
    ended = slime("convert", str(checkpoint), "other", "--to-megatron")
    assert ended.code == 2 and "is a checkpoint already" in ended.err
    assert loop.calls == []
