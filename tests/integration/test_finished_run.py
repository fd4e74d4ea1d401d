"""What is done with the checkpoints of a finished run, by the commands and real training ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.integration.conftest import SlimeRun
from tests.support.hostile_checkpoints import ATTACKS

from slime.run.checkpoint.files import digest_of_json, record_files

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Start = Callable[..., SlimeRun]


def slime(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("slime")), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)


def sign(checkpoint: Path) -> None:
    """Record the hashes of the files as they are now, as somebody does who changed them on purpose."""
    path = checkpoint / "state.json"
    state = json.loads(path.read_text())
    state["files"] = record_files(checkpoint, [checkpoint / name for name in state["files"]])
    del state["sha256"]
    path.write_text(json.dumps({**state, "sha256": digest_of_json(state)}))


@pytest.mark.row("L7")
def test_a_finished_run_is_exported_again_and_a_hostile_copy_of_it_runs_nothing(
    slime_train: Start, model: Path, data: Path
) -> None:
    flags = ("--num-rollout", "1", "--save", "ckpt")
    run = slime_train(*flags)
    assert run.wait() == 0, run.output
    state = json.loads((run.root / "ckpt" / "rollout_000001" / "state.json").read_text())
    held = {path for path in (run.root / "ckpt" / "rollout_000001").rglob("*") if path.is_file()}
    assert len(state["files"]) == len(held) - 1, "every file but state.json has a hash"

    again = slime_train(*flags, "--load", "ckpt", "--save-hf", "exported", name="again")
    assert again.wait() == 0, again.output
    assert "nothing is left to train" in again.output
    assert not list((again.run_dir / "logs").glob("engine*")) and not list((again.run_dir / "logs").glob("rollout*"))
    weights, before = load_file(run.root / "exported" / "model.safetensors"), load_file(model / "model.safetensors")
    assert weights.keys() == before.keys()
    assert any(not weights[name].equal(before[name]) for name in before), "the trained weights, not the original ones"

    hostile, canary = run.root / "hostile", run.root / "canary"
    shutil.copytree(run.root / "ckpt", hostile)
    ATTACKS["in_metadata"](hostile / "rollout_000001" / "megatron", canary)
    changed = slime("convert", "hostile", "model-a", cwd=run.root)
    assert changed.returncode == 2 and "megatron/.metadata has" in changed.stderr, changed
    sign(hostile / "rollout_000001")
    evaluation = ("--eval-prompt-data", "held", str(data), "--reward", "exact_match")
    for words in (("convert", "hostile", "model-b"), ("eval", "hostile", *evaluation, "--eval-max-response-len", "8")):
        ended = slime(*words, cwd=run.root)
        assert ended.returncode == 2, ended
        assert "names posix.system, which could run code" in ended.stderr, ended.stderr
        assert "Traceback" not in ended.stderr, ended.stderr
    assert not canary.exists()
    assert not (run.root / "model-b").exists()
