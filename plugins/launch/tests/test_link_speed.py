"""The two sides of a pair of nodes, in two processes of this machine."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from slime_launch.link_speed import Talker

_side = Talker()


def _import_torch() -> None:
    _side.import_torch()


def _listen(address: str) -> int:
    return _side.listen(address)


def _talk(rank: int, address: str, port: int) -> tuple[float, float]:
    return _side.talk(rank, address, address, port)


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


def test_a_side_that_nobody_answers_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_launch.link_speed.TALK_S", 1.0)
    with pytest.raises(RuntimeError, match=r"(?i)time|connect"):
        Talker().talk(1, "127.0.0.1", "127.0.0.1", 1)
