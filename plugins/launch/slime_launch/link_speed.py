"""How fast each pair of nodes exchanges tensors, by gloo over TCP, as weight syncs on CPUs do."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

#: two processes that have not connected, or exchanged one message, by then do not reach each other
TALK_S = 20.0
#: seconds in which all nodes should have imported torch
_IMPORT_S = 120.0
_SMALL = 256
_ROUNDS = 20
#: bytes of the first broadcast; the next one has as many as take about a second
_FIRST, _MOST = 1 << 20, 256 << 20
_LONG_S = 1.0
#: how long a node may take to say that it is still there, after a pair of it gave no answer
_THERE_S = 10.0
#: of the speed that half of the links have
_SLOW = 0.25


@dataclass(frozen=True)
class Link:
    """What two nodes reach with each other."""

    nodes: tuple[str, str]
    #: seconds of a small all-reduce, and bytes per second of a broadcast; None if they do not reach each other
    all_reduce_s: float | None = None
    broadcast: float | None = None
    #: why they do not
    reason: str = ""


class Talker:
    """One side of a pair; part of what Ray makes on each node."""

    def import_torch(self) -> None:
        """Import torch before anything is timed: from a cold shared folder that can take longer than `TALK_S`."""
        import torch.distributed  # noqa: F401

    def listen(self, address: str) -> int:
        """Open the meeting point of a pair at this address, and return its port."""
        import torch.distributed

        # As runs do: below the ports that the kernel takes for connections.
        from slime_launch.node_settings import family_of, free_port
        from slime_launch.node_state import OWN_PORTS

        port = free_port(address, OWN_PORTS[0])
        # torch by itself would listen on every interface, which fails if somebody listens on another one.
        listening = socket.create_server((address, port), family=family_of(address))
        dist: Any = torch.distributed  # its types leave out what is compiled
        limit = timedelta(seconds=TALK_S)
        self._store = dist.TCPStore(
            address, port, 2, True, limit, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return port

    def talk(self, rank: int, own: str, address: str, port: int) -> tuple[float, float]:
        """Exchange tensors with the other side.

        Args:
            rank: 0: this side listens.
            own: The address of this node.
            address: Of the side that listens.
            port: Likewise.

        Returns:
            Seconds of a small all-reduce, and bytes per second of a broadcast.
        """
        import torch
        import torch.distributed

        dist: Any = torch.distributed  # its types leave out what is compiled
        limit = timedelta(seconds=TALK_S)
        store = self._store if rank == 0 else dist.TCPStore(address, port, 2, False, limit)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own, lazy_init=False)]
        group = dist.ProcessGroupGloo(store, rank, 2, options)

        def seconds(size: int, times: int, call: str) -> float:
            tensor = torch.ones(size // 4)
            started = time.perf_counter()
            for _ in range(times):
                group.allreduce([tensor]).wait() if call == "allreduce" else group.broadcast(tensor, 0).wait()
            # The side that sends is done before everything has arrived.
            group.allreduce([torch.ones(1)]).wait()
            return (time.perf_counter() - started) / times

        small = seconds(_SMALL, _ROUNDS, "allreduce")
        first = seconds(_FIRST, 1, "broadcast")
        # The mean of both sides, which have to choose the same size.
        total = torch.tensor([first])
        group.allreduce([total]).wait()
        size = max(_FIRST, min(_MOST, int(_FIRST * _LONG_S / (float(total) / 2))) // 4 * 4)
        return small, size / seconds(size, 1, "broadcast")


def rounds(names: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """All pairs, in rounds in which each node is in one pair at most."""
    seats: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        seats[1:] = [seats[-1], *seats[1:-1]]


def slow(links: Sequence[Link]) -> tuple[list[Link], float]:
    """The links that are much slower than others, and the bytes per second that half of all carry."""
    rates = [link.broadcast for link in links if link.broadcast]
    usual = median(rates) if rates else 0.0
    return [link for link in links if link.broadcast is not None and link.broadcast < _SLOW * usual], usual


def measure(talkers: Mapping[str, Any], addresses: Mapping[str, str]) -> list[Link]:
    """Measure each pair of nodes, those of a round at the same time; then the slow ones once more, without the others.

    A node that was busy for a moment makes a link look slow; a broken cable does so twice. The better speed counts.

    Args:
        talkers: Ray's handle of the `Talker` of each node.
        addresses: The address of each node.
    """
    import ray

    # A node that fails or is late here is named by its pairs.
    ray.wait([talker.import_torch.remote() for talker in talkers.values()], num_returns=len(talkers), timeout=_IMPORT_S)
    found, silent = dict[tuple[str, str], Link](), set[str]()
    for pairs in rounds(sorted(talkers)):
        found |= {link.nodes: link for link in _meet(pairs, talkers, addresses, silent)}
    again = {link.nodes for link in slow([*found.values()])[0]}
    for pairs in rounds(sorted(talkers)):
        for link in _meet([pair for pair in pairs if pair in again], talkers, addresses, silent):
            found[link.nodes] = max(found[link.nodes], link, key=lambda one: one.broadcast or 0.0)
    return [*found.values()]


def _meet(
    pairs: Sequence[tuple[str, str]], talkers: Mapping[str, Any], addresses: Mapping[str, str], silent: set[str]
) -> Iterator[Link]:
    """Measure these pairs at the same time, except those of `silent` nodes, to which those that freeze are added."""
    import ray

    asked = []
    for pair in pairs:
        one = pair[0]
        if silent & {*pair}:
            continue  # each further pair of it would take as long
        port = talkers[one].listen.remote(addresses[one])
        calls = [
            talkers[node].talk.remote(rank, addresses[node], addresses[one], port) for rank, node in enumerate(pair)
        ]
        asked.append((pair, calls))
    deadline = time.monotonic() + 4 * TALK_S
    for pair, calls in asked:
        try:
            small, rate = zip(*ray.get(calls, timeout=max(1.0, deadline - time.monotonic())), strict=True)
        except ray.exceptions.GetTimeoutError:
            gone = _silent({name: talkers[name] for name in pair})
            silent |= gone
            reason = f"no answer for {4 * TALK_S:g} s"
            if gone:
                reason += f", and {' and '.join(sorted(gone))} answers nothing else (no more of its pairs are tried)"
            yield Link(pair, reason=reason)
        except ray.exceptions.RayTaskError as error:
            yield Link(pair, reason=str(error.cause or error).strip().splitlines()[0].rstrip("."))
        except ray.exceptions.RayError as error:
            yield Link(pair, reason=type(error).__name__)
        else:
            yield Link(pair, max(small), min(rate))


def _silent(talkers: Mapping[str, Any]) -> set[str]:
    """Those that do not answer: their sides of the exchange have ended by now, and an import is no work any more."""
    import ray

    asked = {talker.import_torch.remote(): name for name, talker in talkers.items()}
    _, missing = ray.wait([*asked], num_returns=len(asked), timeout=_THERE_S)
    return {asked[one] for one in missing}
