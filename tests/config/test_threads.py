"""How the cores of a machine are shared between training ranks and engines on CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

from slime.config.run_config import RunConfig
from slime.config.threads import engine_threads, rank_threads


def config(*, async_mode: bool = False, loss_type: str = "policy_loss", **cluster: Any) -> RunConfig:
    run = RunConfig().with_options("cluster", device="cpu", **cluster)
    return run.with_options("rollout", async_mode=async_mode).with_options("algorithm", loss_type=loss_type)


@pytest.mark.parametrize(
    ("cores", "ranks", "engines", "asynchronous", "each_engine", "each_rank"),
    [
        (2, 1, 1, False, 2, 2),  # they take turns
        (2, 1, 1, True, 1, 1),
        (8, 1, 1, True, 4, 4),
        (8, 2, 2, False, 4, 4),
        (8, 2, 2, True, 2, 2),
        (64, 1, 1, False, 4, 64),  # more would pad small batches
        (64, 1, 2, True, 4, 56),
        (9, 1, 2, True, 2, 5),  # what the engines cannot share evenly is the trainer's
        (2, 2, 3, False, 1, 1),  # at least one
        (2, 2, 3, True, 1, 1),
        (1, 1, 1, True, 1, 1),
    ],
)
def test_engines_leave_cores_to_the_trainer_when_they_compute_beside_it(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    ranks: int,
    engines: int,
    asynchronous: bool,
    each_engine: int,
    each_rank: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    run = config(async_mode=asynchronous, rollout_num_gpus=engines)
    assert (engine_threads(run), rank_threads(run, ranks)) == (each_engine, each_rank)


def test_the_ranks_of_one_engine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert engine_threads(config(rollout_num_gpus=4, rollout_num_gpus_per_engine=2)) == 2


def test_stated_numbers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    run = config(async_mode=True, threads_per_engine=3)
    assert (engine_threads(run), rank_threads(run, 1)) == (3, 5)
    run = config(async_mode=True, threads_per_rank=7)
    assert (engine_threads(run), rank_threads(run, 1)) == (4, 7)


def test_a_deterministic_engine_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    run = config(async_mode=True).with_options("run", deterministic=True)
    assert (engine_threads(run), rank_threads(run, 1)) == (1, 7)


def test_supervised_training_has_no_engines_to_leave_cores_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert rank_threads(config(async_mode=True, loss_type="sft_loss"), 1) == 8
