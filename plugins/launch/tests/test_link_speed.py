"""The two sides of a pair of nodes, in two processes of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from slime_launch.link_speed import Link, Talker, measure, slow
from slime_launch.node_settings import free_port
from slime_launch.node_state import OWN_PORTS

_side = Talker()


def _import_torch() -> None:
    _side.import_torch()


def _listen(address: str) -> int:
    return _side.listen(address)


def _talk(rank: int, address: str, port: int) -> tuple[float, float]:
    return _side.talk(rank, address, address, port)


@pytest.mark.slow
def test_two_sides_measure_their_link() -> None:
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawned) as one, ProcessPoolExecutor(1, spawned) as other:
        for pool in (one, other):
            pool.submit(_import_torch).result(120)
        for address in ("127.0.0.1", "::1"):
            port = one.submit(_listen, address).result(120)
            sides = [pool.submit(_talk, rank, address, port) for rank, pool in enumerate((one, other))]
            for side in sides:
                small, rate = side.result(120)
                assert 0 < small < 20 and rate > 1e5


def test_a_side_listens_on_its_own_address_alone() -> None:
    # Where torch's store would listen on every interface, somebody who listens on another is in its way.
    first = free_port("127.0.0.2", OWN_PORTS[0])
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", first)):
        side = Talker()  # which holds the store
        port = side.listen("127.0.0.2")
        own = psutil.Process().net_connections("tcp")
        assert {one.laddr.ip for one in own if one.laddr.port == port} == {"127.0.0.2"} | (
            {"127.0.0.1"} if port == first else set()
        )


class FakeTalker:
    """Answers at once, with the rates it is given and then 1 GB/s, but freezes at its first exchange if it is to."""

    def __init__(self, end: threading.Event, *, freezes: bool = False, rates: Sequence[float] = ()) -> None:
        self._freezes, self._end, self._rates, self._pool = freezes, end, [*rates], ThreadPoolExecutor(1)
        self.talks = 0

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *_: self._pool.submit(getattr(self, f"_{name}")))

    def _import_torch(self) -> None: ...

    def _listen(self) -> int:
        return 1

    def _talk(self) -> tuple[float, float]:
        self.talks += 1
        if self._freezes:
            self._end.wait(60)
        return 1e-3, self._rates.pop(0) if self._rates else 1e9


@pytest.fixture
def rays_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's `wait` and `get`, for the futures of a `FakeTalker`."""

    def wait(calls: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert num_returns == len(calls)
        done, missing = futures.wait(calls, timeout)
        return [*done], [*missing]

    def get(calls: list[Any], *, timeout: float) -> list[Any]:
        if futures.wait(calls, timeout)[1]:
            raise ray.exceptions.GetTimeoutError
        return [call.result() for call in calls]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)


@pytest.mark.usefixtures("rays_calls")
def test_a_node_that_freezes_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_launch.link_speed.TALK_S", 0.25)
    monkeypatch.setattr("slime_launch.link_speed._THERE_S", 1.0)
    end = threading.Event()
    talkers = {name: FakeTalker(end, freezes=name == "c") for name in "abcde"}
    found = {link.nodes: link for link in measure(talkers, dict.fromkeys(talkers, "10.0.0.1"))}
    end.set()
    [(pair, link)] = [(pair, link) for pair, link in found.items() if link.broadcast is None]
    assert "c" in pair and link.reason == (
        "no answer for 1 s, and c answers nothing else (no more of its pairs are tried)"
    )
    assert talkers["c"].talks == 1
    # All pairs of the others were measured.
    assert len(found) == 6 + 1


@pytest.mark.usefixtures("rays_calls")
@pytest.mark.parametrize(("again", "kept"), [(1e9, 1e9), (0.1e9, 0.2e9)])
def test_a_slow_pair_is_measured_once_more_and_its_better_speed_counts(again: float, kept: float) -> None:
    end = threading.Event()
    # Three rounds: b and c, a and c, a and b; then b and c again.
    talkers = {"a": FakeTalker(end), "b": FakeTalker(end, rates=[0.2e9, 1e9, again]), "c": FakeTalker(end)}
    links = measure(talkers, dict.fromkeys(talkers, "10.0.0.1"))
    assert [(link.nodes, link.broadcast) for link in links] == [
        (("b", "c"), kept), (("a", "c"), 1e9), (("a", "b"), 1e9),
    ]  # fmt: skip
    assert [talker.talks for talker in talkers.values()] == [2, 3, 3]
    assert [link.nodes for link in slow(links)[0]] == ([("b", "c")] if kept < 1e9 else [])


@pytest.mark.usefixtures("rays_calls")
def test_many_slow_pairs_take_no_more_rounds_than_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[list[tuple[str, str]]] = []

    def meet(pairs: list[tuple[str, str]], *_: object) -> list[Link]:
        met.append(pairs)
        return [Link(pair, 1e-3, 1e7 if {*pair} & {"a", "b"} else 1e9) for pair in pairs]

    monkeypatch.setattr("slime_launch.link_speed._meet", meet)
    talkers = {name: FakeTalker(threading.Event()) for name in "abcdefgh"}
    assert len(slow(measure(talkers, dict.fromkeys(talkers, "10.0.0.1")))[0]) == 13
    assert len(met) == 7 + 7 and sum(map(len, met[7:])) == 13
    for pairs in met:
        assert len({name for pair in pairs for name in pair}) == 2 * len(pairs)


@pytest.mark.slow
def test_a_side_that_nobody_answers_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_launch.link_speed.TALK_S", 1.0)
    with pytest.raises(RuntimeError, match=r"timed out .* to connect to \(127\.0\.0\.1, 1\)"):
        Talker().talk(1, "127.0.0.1", "127.0.0.1", 1)
