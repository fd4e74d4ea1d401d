"""Tensors shared with an unrelated process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from weakref import WeakSet

import pytest
import torch
from tests.support.strangers import stranger_can_open
from torch import Tensor

from slime.weights.transports.tensor import Layout, SharedBlock, TensorTransport, laid_out
from slime.weights.transports.transport import Fleet

CPU = torch.device("cpu")

_READER = """
import base64, pickle, sys, torch
import torch.multiprocessing.reductions as reductions
from slime_cpu.sglang_memory import opening_shared_weights
reductions.rebuild_storage_filename = opening_shared_weights(reductions.rebuild_storage_filename)
for line in sys.stdin:
    for name, tensor in pickle.loads(base64.b64decode(line)):
        print(name, tensor.dtype, tuple(tensor.shape), tensor.double().sum().item(), flush=True)
"""


def shared_weights(pid: int) -> set[str]:
    """The inodes of unnamed files with weights that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return set(re.findall(r" (\d+) +/memfd:slime-weights \(deleted\)$", maps, re.MULTILINE))


def read_by(reader: subprocess.Popen[str], messages: list[str]) -> list[str]:
    """Lines about the three tensors of each message."""
    assert reader.stdin is not None and reader.stdout is not None
    for message in messages:
        reader.stdin.write(f"{message}\n")
    reader.stdin.flush()
    return [reader.stdout.readline().strip() for _ in range(3 * len(messages))]


def filled(block: SharedBlock, named: list[tuple[str, Tensor]]) -> Layout:
    layout, _ = laid_out(named)
    block.fill(layout, named)
    return layout


@pytest.mark.slow
def test_an_unrelated_process_reads_what_is_put_into_a_block_again_and_into_another_in_its_place() -> None:
    block = SharedBlock(4096, CPU)
    reader = subprocess.Popen([sys.executable, "-c", _READER], stdin=-1, stdout=-1, text=True)
    try:
        for factor in (1, 2, 3):
            if factor == 3:
                descriptor = block._file.fileno()
                del block
                tried = [SharedBlock(8192, CPU)]
                while tried[-1]._file.fileno() < descriptor:  # lower ones that other tests have closed meanwhile
                    tried.append(SharedBlock(8192, CPU))
                block = tried[-1]
                assert block._file.fileno() == descriptor  # the same path, for other memory
            named = [
                ("half", factor * torch.arange(3, dtype=torch.bfloat16)),
                ("matrix", factor * torch.arange(12.0).view(3, 4).t()),
                ("empty", torch.empty(0, 4)),
            ]
            messages = block.handles(filled(block, named), 2)
            expected = [
                f"half torch.bfloat16 (3,) {3.0 * factor}",
                f"matrix torch.float32 (4, 3) {66.0 * factor}",
                "empty torch.float32 (0, 4) 0.0",
            ]
            assert read_by(reader, messages) == expected * 2
    finally:
        reader.kill()
        reader.communicate()


def test_on_a_gpu_the_block_before_is_gone_before_the_next_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the CPU stands in for that of a GPU."""
    living, before, make = WeakSet[SharedBlock](), list[int](), SharedBlock.__init__

    def counted(self: SharedBlock, size: int, device: torch.device) -> None:
        before.append(len(living))
        living.add(self)
        make(self, size, device)

    monkeypatch.setattr(SharedBlock, "__init__", counted)
    transport = TensorTransport(engines=[], timeout_s=60, on_gpu=True, bucket_bytes=4096)
    transport._send_part(Fleet([], 60), ((str(number), torch.ones(1000)) for number in range(5)), "1")
    assert before == [0] * 5
    assert not living


def test_another_user_cannot_open_a_block() -> None:
    before = os.umask(0)
    try:
        block = SharedBlock(4096, CPU)
    finally:
        os.umask(before)
    path = Path(f"/proc/{os.getpid()}/fd/{block._file.fileno()}")
    assert path.stat().st_size == 4096
    assert not stranger_can_open(path)


def test_the_tensors_themselves_are_not_in_the_message() -> None:
    block = SharedBlock(2**20, CPU)
    (message,) = block.handles(filled(block, [("large", torch.zeros(100_000))]), 1)
    assert len(message) < 2000


def test_a_block_has_no_name_that_could_be_opened_or_left_behind() -> None:
    before = shared_weights(os.getpid())
    block = SharedBlock(4096, CPU)
    filled(block, [("tensor", torch.ones(7))])
    assert len(shared_weights(os.getpid()) - before) == 1
    assert os.fstat(block._file.fileno()).st_nlink == 0
    del block
    assert shared_weights(os.getpid()) == before
