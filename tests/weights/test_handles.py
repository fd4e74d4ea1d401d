"""Tensors shared with an unrelated process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no stubs of its own
import pytest
import torch
from tests.support.strangers import stranger_can_open

from slime.errors import WeightSyncError
from slime.weights.transports.tensor import SharedBucket

_READER = """
import base64, pickle, sys, torch
for line in sys.stdin:
    for name, tensor in pickle.loads(base64.b64decode(line)):
        print(name, tensor.dtype, tuple(tensor.shape), tensor.double().sum().item())
"""


def test_an_unrelated_process_can_read_the_tensors_several_times() -> None:
    bucket = SharedBucket(
        [
            ("half", torch.arange(3, dtype=torch.bfloat16)),
            ("matrix", torch.arange(12.0).view(3, 4).t()),
            ("empty", torch.empty(0, 4)),
        ]
    )
    text = "\n".join([bucket.serialized(), bucket.serialized()])
    reader = subprocess.run(
        [sys.executable, "-c", _READER], input=text, capture_output=True, text=True, timeout=240, check=True
    )
    expected = [
        "half torch.bfloat16 (3,) 3.0",
        "matrix torch.float32 (4, 3) 66.0",
        "empty torch.float32 (0, 4) 0.0",
    ]
    assert reader.stdout.splitlines() == expected * 2


def test_another_user_reaches_neither_the_tensors_nor_the_process_that_keeps_them() -> None:
    """Whatever the user's umask lets in elsewhere."""
    before = os.umask(0)
    try:
        bucket = SharedBucket([("secret", torch.ones(1000))])
        assert bucket.serialized()
    finally:
        os.umask(before)
    segments = list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))
    sockets = {one.laddr for child in psutil.Process().children() for one in child.net_connections("unix") if one.laddr}
    assert segments and sockets
    assert [path for path in (*segments, *map(Path, sockets)) if stranger_can_open(path)] == []


def test_the_tensors_themselves_are_not_in_the_message() -> None:
    assert len(SharedBucket([("large", torch.zeros(100_000))]).serialized()) < 2000


def test_tensors_larger_than_shared_memory_are_refused() -> None:
    with pytest.raises(WeightSyncError, match="shm-size"):
        SharedBucket([("huge", torch.zeros(1).expand(2**45))])
