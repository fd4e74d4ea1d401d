"""The trainer's state written in the background: the state at the time of saving, whatever training does meanwhile."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.model_folders import Folders
from tests.train.harness import Centred, RankLauncher, make_batch, make_config, run_ranks

from slime.errors import CheckpointError
from slime.registry.plugin_set import load_plugins
from slime.run.trainer import TrainerProcess
from slime.train.checkpoint_io import BackgroundWrite

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BATCHES = [make_batch(seed=seed) for seed in range(2)]


class HeldBack(BackgroundWrite[str]):
    """Writes nothing before `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def _write(self, then: Callable[[], str]) -> str:
        assert self.go.wait(60)
        return super()._write(then)


def save_twice(launcher: RankLauncher, config: Any, folder: Path) -> tuple[bool, bool, str, bool]:
    """Save the same state at once to `now` and, while a step changes it, in the background to `later`."""
    rank = launcher.start(config, Centred())
    rank.train(BATCHES[0])
    assert rank.reference is not None
    rank.reference.renew()
    rank.save(folder / "now")
    write = HeldBack()
    rank.save(folder / "later", write)
    before = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    write.start(then=lambda: "hashes")
    rank.train(BATCHES[1])
    changed = all(not torch.equal(tensor, before[name]) for name, tensor in rank.named_hf_weights())
    early = write.written
    write.go.set()
    answer = changed, early, write.finish(), write.written
    rank.close()
    return answer


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "one without a distributed optimizer": (1, {"use_distributed_optimizer": False}),
    "data 2": (2, {}),
    "tensor 2": (2, {"tensor_model_parallel_size": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_hold_the_state_at_the_time_of_saving(layout: str, model_folder: Folders, tmp_path: Path) -> None:
    world_size, sizes = LAYOUTS[layout]
    config = make_config(model_folder("qwen3", tied=True), world_size=world_size, megatron=sizes, use_kl_loss=True)
    for answer in run_ranks(save_twice, world_size, config, tmp_path):
        assert answer == (True, False, "hashes", True)
    files = {path.relative_to(tmp_path / "now") for path in (tmp_path / "now").rglob("*") if path.is_file()}
    assert files == {path.relative_to(tmp_path / "later") for path in (tmp_path / "later").rglob("*") if path.is_file()}
    tensors = sorted(path for path in files if path.suffix == ".distcp")
    assert {path.parent.name for path in tensors} == {"", "reference"}
    for path in tensors:
        assert (tmp_path / "now" / path).read_bytes() == (tmp_path / "later" / path).read_bytes(), path


def sizes_when_flushed(launcher: RankLauncher, config: Any, checkpoint: Path) -> dict[str, int]:
    """The files that this rank has flushed to disk, and how many bytes they had, by a stand-in for fsync."""
    fingerprint = load_plugins(config.plugins).fingerprint()
    meeting = "127.0.0.1", launcher.port
    rank = TrainerProcess(config, checkpoint.parent, fingerprint, launcher.rank, meeting)
    flushed: dict[str, int] = {}
    fsync = os.fsync

    def record(handle: int) -> None:
        fsync(handle)
        flushed[os.readlink(f"/proc/self/fd/{handle}")] = os.fstat(handle).st_size

    os.fsync = record
    for part, background in (("now", False), ("later", True)):
        rank.begin_save(checkpoint, checkpoint / part, background)
        rank.finish_save()
    rank.close()
    return flushed


def test_ranks_flush_every_file_to_its_last_byte(model_folder: Folders, tmp_path: Path) -> None:
    """Megatron does not flush common.pt and metadata.json, and torch .metadata perhaps not to its end."""
    sizes = LAYOUTS["tensor 2"][1]
    config = make_config(model_folder("qwen3", tied=True), world_size=2, megatron=sizes, advantage_estimator="grpo")
    flushed: dict[str, int] = {}
    for of_rank in run_ranks(sizes_when_flushed, 2, config, tmp_path):
        flushed |= of_rank
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"common.pt", "metadata.json", ".metadata"}
    assert {path.parent.name for path in files} == {"now", "later"}
    assert {str(path): flushed.get(str(path)) for path in files} == {str(path): path.stat().st_size for path in files}


def save_to_a_full_disk(launcher: RankLauncher, config: Any, folder: Path) -> tuple[bool, str]:
    """What the second rank's full disk makes of a save in the background, on each rank."""
    rank = launcher.start(config, Centred())
    write = HeldBack()
    rank.save(folder, write)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if launcher.rank == 1:
        os.fsync = full
    write.start(then=lambda: "hashes")
    write.go.set()
    rank.train(BATCHES[0])  # and no error reaches training itself
    try:
        write.finish()
    except CheckpointError as error:
        return write.written, str(error)
    finally:
        rank.close(failed=True)
    return write.written, "no error"


def test_an_error_of_one_ranks_disk_fails_the_save_on_all(model_folder: Folders, tmp_path: Path) -> None:
    config = make_config(model_folder("qwen3", tied=True), world_size=2, megatron=LAYOUTS["tensor 2"][1])
    (done, message), (also, _) = run_ranks(save_to_a_full_disk, 2, config, tmp_path / "state")
    assert done and also
    assert "could not be written" in message and "the disk is full; " in message and "bytes are free" in message
    assert not (tmp_path / "state" / "metadata.json").exists()
