"""How the senders of one sync agree: the first rank of each pipeline stage, led by that of the first stage.

Every stage gathers its own tensors and broadcasts them in its own group. But an engine receives one bucket at a time,
and all engines must receive them in one order: of two that wait for different senders, each may be one through which
the other's bucket passes. So the leader alone calls the engines. It takes the stages in turn: a follower says what its
next bucket holds, and begins to broadcast it, which waits until the leader has told the engines to receive it.

They talk over a TCP connection for each sync, in JSON, as soon as both have said the sync's secret word, which the
followers get through Megatron's process group.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from slime.engine.ports import host_port, listening_socket
from slime.errors import WeightSyncError

logger = logging.getLogger(__name__)

_POLL_S = 0.02
#: how long the sender at the other end may take to say what went wrong
_LAST_WORDS_S = 0.5


class PeerError(WeightSyncError):
    """The sender at the other end has failed, is gone, or says nothing."""


class Peer:
    """The other end of a connection between the leader and a follower."""

    def __init__(self, connected: socket.socket, name: str, stage: int = 0) -> None:
        """
        Args:
            connected: The socket.
            name: The sender at the other end, for messages.
            stage: Its pipeline stage.
        """
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(True)
        self.name, self.stage = name, stage
        self._connection = Connection(connected.detach())
        self._unread: deque[dict[str, Any]] = deque()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError:
            raise self._gone() from None

    def check(self, seconds: float = 0.0) -> None:
        """Take what has arrived, or arrives within some seconds.

        Raises:
            PeerError: The other end has failed or is gone.
        """
        try:
            while self._connection.poll(seconds):
                message = json.loads(self._connection.recv_bytes())
                if "error" in message:
                    raise PeerError(f"Weight sync: {self.name} failed: {message['error']}")
                self._unread.append(message)
                seconds = 0.0
        except (EOFError, OSError):
            raise self._gone() from None

    def hear(self, deadline: float, watch: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """The next message.

        Args:
            deadline: Monotonic seconds.
            watch: Called while waiting; may raise.

        Raises:
            PeerError: The other end has failed, is gone, or says nothing until the deadline.
        """
        while not self._unread:
            self.check(_POLL_S)
            watch()
            if not self._unread and time.monotonic() > deadline:
                raise PeerError(
                    f"Weight sync: {self.name} did not send its part in time. Look at its log;"
                    " --weight-sync-timeout-s sets the limit."
                )
        return self._unread.popleft()

    def last_words(self) -> str | None:
        """What went wrong at the other end, if it says so within a moment."""
        try:
            self.check(_LAST_WORDS_S)
        except PeerError as error:
            return str(error)
        return None

    def close(self) -> None:
        """Hang up, from which the other end learns that the sync has failed unless it was told of its end."""
        if not self._connection.closed:
            self._connection.close()

    def _gone(self) -> PeerError:
        return PeerError(f"Weight sync: {self.name} has left before its end. Look at its log.")


@contextmanager
def followers(group: Any, address: str, deadline: float) -> Iterator[list[Peer]]:
    """The connections of the leader to the other senders, in the order of their stages.

    Args:
        group: The pipeline group of the senders; its first is this process.
        address: This host's address, as the others reach it.
        deadline: Monotonic seconds.

    Raises:
        WeightSyncError: A sender did not come in time.
    """
    word, count = secrets.token_hex(16), dist.get_world_size(group) - 1
    peers: list[Peer] = []
    with listening_socket(address) as listening:
        dist.broadcast_object_list([(address, listening.getsockname()[1], word)], group=group, group_src=0)
        try:
            while len(peers) < count:
                peer = _accepted(listening, deadline, f"{count - len(peers)} of {count} other senders")
                said = peer.hear(deadline)
                if not hmac.compare_digest(str(said.get("word")), word):
                    peer.close()  # a stranger
                    continue
                peer.name, peer.stage = f"the sender of stage {said['stage']} (rank {said['rank']})", said["stage"]
                peers.append(peer)
            yield sorted(peers, key=lambda one: one.stage)
        finally:
            for peer in peers:
                peer.close()


def _accepted(listening: socket.socket, deadline: float, missing: str) -> Peer:
    listening.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        return Peer(listening.accept()[0], "another sender")
    except TimeoutError:
        raise WeightSyncError(
            f"Weight sync: {missing} did not connect to {host_port(*listening.getsockname()[:2])} in time. Look at the"
            " logs of the trainer's ranks; --weight-sync-timeout-s sets the limit."
        ) from None


@contextmanager
def leader(group: Any, deadline: float) -> Iterator[Peer]:
    """The connection of a follower to the leader; arguments as of `followers`."""
    told: list[Any] = [None]
    dist.broadcast_object_list(told, group=group, group_src=0)
    address, port, word = told[0]
    try:
        connected = socket.create_connection((address, port), timeout=max(0.001, deadline - time.monotonic()))
    except OSError as error:
        raise WeightSyncError(
            f"Weight sync: rank 0 cannot be reached at {host_port(address, port)}: {error}"
        ) from error
    peer = Peer(connected, "the leading sender (rank 0)")
    try:
        peer.tell({"word": word, "stage": dist.get_rank(group), "rank": dist.get_rank()})
        yield peer
    finally:
        peer.close()


def senders_group() -> Any:
    """Megatron's pipeline group of this sender, which is that of all senders."""
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_group()


def stage_metrics(shares: Mapping[int, tuple[int, float]]) -> dict[str, float]:
    """Metrics of the senders of a sync: bytes, seconds and GB/s of each, and the slowest stage, which is logged too.

    An engine receives one bucket at a time, so the seconds of all senders make up the time of sending.

    Args:
        shares: Stage -> bytes, and seconds.
    """
    rates = {stage: size / 1e9 / max(seconds, 1e-9) for stage, (size, seconds) in shares.items()}
    slowest = min(rates, key=rates.__getitem__)
    metrics = {"perf/sync/slowest_stage": float(slowest)}
    told = []
    for stage, (size, seconds) in sorted(shares.items()):
        numbers = {"bytes": float(size), "seconds": seconds, "gb_per_s": rates[stage]}
        metrics |= {f"perf/sync/stage{stage}_{name}": number for name, number in numbers.items()}
        told.append(f"stage {stage} {size / 2**20:.1f} MiB in {seconds:.2f} s ({rates[stage]:.2f} GB/s)")
    logger.info("weights sent by %s; the slowest was stage %d", ", ".join(told), slowest)
    return metrics
