"""The predicted size of a checkpoint is that of the files that training ranks write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from tests.train.harness import RankLauncher, make_batch, make_config, run_ranks

from slime.config import read_config
from slime_planner.predicted_checkpoint import checkpoint_bytes
from slime_planner.predicted_sync import weight_bytes


def save(launcher: RankLauncher, config: Any, folder: Path) -> None:
    rank = launcher.start(config)
    rank.train(make_batch())
    rank.save(folder)
    rank.close()


@pytest.mark.engine
@pytest.mark.parametrize("half", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["float32", "bfloat16"])
def test_the_files_of_a_checkpoint_have_the_predicted_size(half: bool, model_folder: Folders, tmp_path: Path) -> None:
    folder = model_folder("qwen3", tied=True)
    config = make_config(folder, loss_type="sft_loss", megatron={"bf16": half})
    run_ranks(save, 1, config, tmp_path / "saved")
    predicted = checkpoint_bytes(config, read_architecture(folder))
    tensors = sum(file.stat().st_size for file in (tmp_path / "saved").glob("*.distcp"))
    # What stands around each tensor counts in a model as small as this.
    assert predicted < tensors < predicted + 2**18, (predicted, tensors)


def test_a_renewed_reference_is_a_second_copy_and_adapters_are_saved_alone(model_folder: Folders) -> None:
    model = read_architecture(model_folder("qwen3", tied=True))
    plain, weights = checkpoint_bytes(read_config([]), model), weight_bytes(read_config([]), model)
    assert plain == 4 * weights  # float32: the number itself, the optimizer's copy and two moments
    renewed = ["--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-update-interval", "5"]
    assert checkpoint_bytes(read_config(renewed), model) == plain + weights
    assert 0 < checkpoint_bytes(read_config(["--lora-rank", "1"]), model) < plain / 5
