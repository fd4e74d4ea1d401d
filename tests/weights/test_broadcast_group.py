"""Members of a broadcast group that end."""

from __future__ import annotations

import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from slime.errors import WeightSyncError
from slime.weights.transports.group import BroadcastGroup

#: an engine's side of a group: one that receives two tensors
MEMBER = """
import sys, datetime, torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d
seconds = datetime.timedelta(seconds=60)
store = TCPStore("127.0.0.1", int(sys.argv[1]), int(sys.argv[3]), timeout=seconds, wait_for_workers=False)
for part in ("two", "two/", "cpu/"):
    store = distributed_c10d.PrefixStore(part, store)
group = distributed_c10d.ProcessGroupGloo(store, int(sys.argv[2]), int(sys.argv[3]), seconds)
print("joined", flush=True)
sys.stdin.readline()
try:
    for _ in range(2):
        group.broadcast(torch.zeros(2**22), 0).wait()
except RuntimeError:
    print("failed", flush=True)
"""


def member(group: BroadcastGroup, rank: int) -> subprocess.Popen[bytes]:
    """A process of a group, which receives once it gets a line."""
    command = [sys.executable, "-c", MEMBER, str(group.port), str(rank), str(group.world_size)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def send(group: BroadcastGroup, tensor: torch.Tensor) -> None:
    """Broadcast a tensor, and wait for the end of that."""
    group.begin(tensor, deadline=time.monotonic() + 60, watch=lambda: None)
    group.finish(deadline=time.monotonic() + 60, watch=lambda: None)


@pytest.mark.slow
def test_a_broadcast_to_a_member_that_has_ended_fails_as_a_weight_sync() -> None:
    group = BroadcastGroup(name="two", world_size=2, backend="gloo", address="127.0.0.1", timeout_s=30)
    ended = member(group, 1)
    try:
        group.join(deadline=time.monotonic() + 60, watch=lambda: None)
        ended.kill()
        ended.wait()
        with pytest.raises(WeightSyncError, match="the broadcast to the engines failed"):
            send(group, torch.zeros(2**22))
    finally:
        ended.kill()
        ended.communicate()
        group.close()


@pytest.mark.slow
def test_when_a_broadcast_has_failed_the_other_members_are_let_go_at_once() -> None:
    group = BroadcastGroup(name="two", world_size=3, backend="gloo", address="127.0.0.1", timeout_s=300)
    ended, waiting = members = [member(group, rank) for rank in (1, 2)]
    try:
        group.join(deadline=time.monotonic() + 60, watch=lambda: None)
        assert waiting.stdin is not None and waiting.stdout is not None
        assert waiting.stdout.readline() == b"joined\n"
        ended.kill()
        ended.wait()
        waiting.stdin.write(b"\n")
        waiting.stdin.flush()
        with pytest.raises(WeightSyncError) as caught:
            send(group, torch.zeros(2**22))
        group.close()
        # Not when the error, with its traceback, is gone: what cleans up after it asks them.
        assert select.select([waiting.stdout], [], [], 25)[0] and waiting.stdout.readline() == b"failed\n", caught
    finally:
        for one in members:
            one.kill()
            one.communicate()


class FakeNccl:
    """Stands for NCCL's backend, which connects inside its first broadcast: an engine never comes, or it fails."""

    def __init__(self, error: str = "") -> None:
        self.error, self.abandoned = error, threading.Event()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:  # noqa: ARG002 - torch's parameters
        if self.error:
            raise RuntimeError(self.error)
        self.abandoned.wait(60)

    def abort(self) -> None:
        self.abandoned.set()


def refuse() -> None:
    raise WeightSyncError("engine 1 has ended")


@pytest.mark.parametrize(
    ("error", "seconds", "watch", "said"),
    [
        ("", 0.2, lambda: None, "NCCL did not connect to the engines in time"),
        ("", 60, refuse, "engine 1 has ended"),
        ("Duplicate GPU detected", 60, lambda: None, "connecting to the engines by NCCL failed: Duplicate GPU"),
    ],
)
def test_the_first_broadcast_of_nccl_is_given_up_when_an_engine_does_not_connect(
    error: str, seconds: float, watch: Callable[[], None], said: str
) -> None:
    group = BroadcastGroup(name="two", world_size=2, backend="nccl", address="127.0.0.1", timeout_s=60)
    group._joined = FakeNccl(error)
    try:
        with pytest.raises(WeightSyncError, match=said):
            group.begin(torch.zeros(1), deadline=time.monotonic() + seconds, watch=watch)
    finally:
        group.close()
