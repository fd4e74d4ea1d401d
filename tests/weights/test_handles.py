"""Tensors shared with an unrelated process."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.errors import WeightSyncError
from slime.weights.transports.tensor import SharedBlock

CPU = torch.device("cpu")
ENGINE: Any = SimpleNamespace(url="engine", tp_size=2)  # stands in for an `EngineControl`

_READER = """
import base64, pickle, sys, torch
for line in sys.stdin:
    for name, tensor in pickle.loads(base64.b64decode(line)):
        print(name, tensor.dtype, tuple(tensor.shape), tensor.double().sum().item(), flush=True)
"""
#: shares a tensor, says so, and waits
_SHARER = """
import sys, torch
from types import SimpleNamespace
from slime.weights.transports.tensor import SharedBlock
block = SharedBlock(4096, torch.device("cpu"))
block.fill([("tensor", torch.ones(7))], [SimpleNamespace(url="engine", tp_size=1)])
print("shared", flush=True)
sys.stdin.read()
"""


def shared_files(pid: int) -> set[Path]:
    """Shared-memory files that a process has mapped."""
    return set(map(Path, re.findall(r"/dev/shm/torch_\S+", Path(f"/proc/{pid}/maps").read_text())))


def test_an_unrelated_process_can_read_what_is_put_into_a_block_again_and_again() -> None:
    block = SharedBlock(4096, CPU)
    reader = subprocess.Popen([sys.executable, "-c", _READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin is not None and reader.stdout is not None
    try:
        for factor in (1, 2):
            named = [
                ("half", factor * torch.arange(3, dtype=torch.bfloat16)),
                ("matrix", factor * torch.arange(12.0).view(3, 4).t()),
                ("empty", torch.empty(0, 4)),
            ]
            messages = block.fill(named, [ENGINE])["engine"]
            assert len(messages) == 2  # one for each rank
            for message in messages:
                reader.stdin.write(f"{message}\n")
            reader.stdin.flush()
            expected = [
                f"half torch.bfloat16 (3,) {3.0 * factor}",
                f"matrix torch.float32 (4, 3) {66.0 * factor}",
                "empty torch.float32 (0, 4) 0.0",
            ]
            assert [reader.stdout.readline().strip() for _ in range(6)] == expected * 2
    finally:
        reader.kill()
        reader.communicate()


def test_the_tensors_themselves_are_not_in_the_message() -> None:
    messages = SharedBlock(2**20, CPU).fill([("large", torch.zeros(100_000))], [ENGINE])
    assert len(messages["engine"][0]) < 2000


def test_tensors_larger_than_shared_memory_are_refused() -> None:
    with pytest.raises(WeightSyncError, match="shm-size"):
        SharedBlock(2**47, CPU)


def test_only_this_user_can_open_a_block() -> None:
    before = shared_files(os.getpid())
    block = SharedBlock(4096, CPU)
    (made,) = shared_files(os.getpid()) - before
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    del block
    assert not made.exists()


def test_a_block_vanishes_with_a_trainer_that_is_killed() -> None:
    trainer = subprocess.Popen([sys.executable, "-c", _SHARER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"shared\n"
        (made,) = shared_files(trainer.pid)
        assert made.exists()
        trainer.kill()
        trainer.wait()
        deadline = time.monotonic() + 60
        while made.exists():
            assert time.monotonic() < deadline, f"{made} was left behind"
            time.sleep(0.05)
    finally:
        trainer.kill()
        trainer.communicate()
