"""A checkpoint that somebody made to run code is refused by name, and none of its code runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.hostile_checkpoints import ATTACKS
from tests.support.model_folders import Folders
from tests.train.critics import critic_config, start
from tests.train.harness import RankLauncher, make_batch, run_ranks

from slime.errors import CheckpointError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

#: the parts that a rank reads in this format, as folders inside the trainer's part
PARTS = {"policy": "", "critic": "critic", "reference": "reference"}


def attack_every_part(launcher: RankLauncher, config: Any, folder: Path) -> dict[tuple[str, str, bool], str]:
    """What loading says about each attack, in each part, for a resumed run (True) and for a new one."""
    # Only an explicit `weights_only=True` withstands this.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    rank = start(launcher, config)
    rank.train(make_batch())
    rank.save(folder / "saved")
    said: dict[tuple[str, str, bool], str] = {}
    for part, inside in PARTS.items():
        for name, attack in ATTACKS.items():
            hostile = folder / "hostile"
            shutil.copytree(folder / "saved", hostile)
            attack(hostile / inside, folder / "canary")
            for resumed in (True, False):
                try:
                    rank.load(hostile, weights_only=not resumed)
                    said[part, name, resumed] = "loaded"
                except CheckpointError as error:
                    said[part, name, resumed] = str(error)
            shutil.rmtree(hostile)
    rank.load(folder / "saved")
    rank.close(failed=True)
    return said


def test_no_part_of_a_checkpoint_runs_code(model_folder: Folders, tmp_path: Path) -> None:
    folder = model_folder("qwen3", tied=True)
    config = critic_config(folder, use_kl_loss=True, kl_loss_coef=0.5, ref_update_interval=1)
    [said] = run_ranks(attack_every_part, 1, config, tmp_path)
    assert not (tmp_path / "canary").exists()
    # A new run takes the weights as its reference, and does not look at the saved one, nor at what is not sharded.
    # Of a reference nobody does.
    unread = {key for key in said if sum((not key[2], key[0] == "reference", key[1] == "in_common")) >= 2}
    assert {key for key, text in said.items() if text == "loaded"} == unread
    for key, text in said.items():
        if key not in unread:
            assert f"{tmp_path}/hostile" in text, (key, text)
            # A weight that is called an object is refused before it is read.
            assert "names posix.system" in text or key[1] == "in_a_tensor_called_an_object", (key, text)
