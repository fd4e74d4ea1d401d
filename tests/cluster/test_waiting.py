"""Waiting for actors: what an actor raised, or that it died or is late, is told in words that name the wait."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from slime.cluster.session import RaySession
from slime.cluster.waiting import wait_for
from slime.config import RunConfig
from slime.config.options import ClusterOptions
from slime.errors import DeadlineError, SlimeError, TrainerError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120), pytest.mark.usefixtures("session")]


class Actor:
    def answer(self, value: int) -> int:
        return value

    def fail(self, error: Exception) -> None:
        raise error

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def die(self) -> None:
        os._exit(3)


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with RaySession(RunConfig(cluster=ClusterOptions(device="cpu"))):
        yield


@pytest.fixture
def actor() -> Iterator[Any]:
    handle = ray.remote(Actor).options(num_cpus=0).remote()
    yield handle
    ray.kill(handle)


def test_answers_come_in_the_order_asked(actor: Any) -> None:
    assert wait_for([actor.answer.remote(i) for i in (3, 1, 2)], "asking", 60) == [3, 1, 2]


def test_what_slime_raises_on_purpose_arrives_as_it_is(actor: Any) -> None:
    with pytest.raises(TrainerError, match=r"^the loss is nan$"):
        wait_for([actor.fail.remote(TrainerError("the loss is nan"))], "training", 60)


def test_any_other_error_arrives_with_its_type_and_traceback(actor: Any) -> None:
    with pytest.raises(SlimeError) as caught:
        wait_for([actor.fail.remote(AssertionError("wrong shape"))], "building the model", 60)
    assert str(caught.value).startswith("building the model: AssertionError: wrong shape\n")
    assert "in fail" in str(caught.value)


def test_an_error_is_not_kept_waiting_by_the_others(actor: Any) -> None:
    other = ray.remote(Actor).options(num_cpus=0).remote()
    started = time.monotonic()
    with pytest.raises(TrainerError):
        wait_for([other.sleep.remote(60), actor.fail.remote(TrainerError("no"))], "training", 60)
    assert time.monotonic() - started < 30
    ray.kill(other)


def test_a_process_that_dies_is_named_by_what_was_waited_for(actor: Any) -> None:
    with pytest.raises(SlimeError, match=r"^training: the process died"):
        wait_for([actor.die.remote()], "training", 60)


def test_a_wait_ends_at_its_deadline(actor: Any) -> None:
    with pytest.raises(DeadlineError, match=r"^training: 1 of 1 processes had not answered after 2 s"):
        wait_for([actor.sleep.remote(60)], "training", 2)


def test_the_watch_may_end_a_wait(actor: Any) -> None:
    def watch() -> None:
        raise TrainerError("an engine is gone")

    with pytest.raises(TrainerError, match="an engine is gone"):
        wait_for([actor.sleep.remote(60)], "training", 60, watch)
