"""A small form of `benchmarks/bench_fleet.py`: fair shares, and every sample exactly once. No times."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from benchmarks.fleet.load import GROUP_SIZE, PROMPT_TOKENS, Cost, Load, run_load
from benchmarks.fleet.stub_engines import Fleet, lengths

from slime.rollout.batch_in_progress import sampling_seed

SEED = 42
ENGINES = 4


def check_samples(cost: Cost, fleet: Fleet) -> list[int]:
    """Every sample of the batches has the whole response of its seed; the indices of their groups."""
    groups = [group for rollout in cost.batches for group in rollout.groups]
    for group in groups:
        assert len(group.samples) == GROUP_SIZE
        for sample in group.samples:
            assert sample.index is not None
            assert sample.response_length == fleet.length(sampling_seed(SEED, sample.index))
            assert sample.rollout_log_probs is not None
            assert len(sample.rollout_log_probs) == sample.response_length
            assert sample.reward == float(sample.index % 2)
    return [group.index for group in groups]


@pytest.mark.slow
def test_all_engines_have_the_same_share_and_every_sample_is_asked_for_once() -> None:
    fleet = Fleet(engines=ENGINES, lengths=lengths(20, 1.0, 500), prompt=PROMPT_TOKENS, step_s=1e-5, hold=True)
    load = Load(fleet=fleet, batch=32, started=32, rollouts=2, in_flight=32 * GROUP_SIZE)
    cost = asyncio.run(run_load(load, keep=True))
    assert sorted(check_samples(cost, fleet)) == list(range(64))
    seeds = Counter(sampling_seed(SEED, index) for index in range(load.samples))
    assert cost.served.finished == seeds
    assert cost.served.most == [load.in_flight // ENGINES] * ENGINES, "when all were in flight"
    assert sum(cost.served.requests) == load.samples
    assert cost.tokens == cost.trained_tokens == cost.served.tokens


@pytest.mark.slow
def test_what_is_aborted_is_continued_and_no_group_is_trained_on_twice() -> None:
    fleet = Fleet(engines=ENGINES, lengths=lengths(20, 1.2, 500), prompt=PROMPT_TOKENS, step_s=1e-4, halt=200)
    load = Load(fleet=fleet, batch=8, started=16, rollouts=4, partial=True, in_flight=16 * GROUP_SIZE)
    cost = asyncio.run(run_load(load, keep=True))
    groups = check_samples(cost, fleet)
    assert len(set(groups)) == len(groups) == 32
    assert max(cost.served.finished.values()) == 1, "no sample is finished twice"
    # However slow the machine is, a long response of the first groups is not finished before its group is given back.
    starts = range(load.started * GROUP_SIZE)
    long = {index // GROUP_SIZE for index in starts if fleet.length(sampling_seed(SEED, index)) > fleet.halt}
    assert 0 < len(long) <= load.started - load.batch
    assert cost.batches[0].metrics["rollout/given_back"] >= len(long)
    assert sum(rollout.metrics["rollout/resumed"] for rollout in cost.batches) >= len(long)


def test_short_answers_go_together() -> None:
    fleet = Fleet(engines=ENGINES, lengths=lengths(12, 0.5, 60), prompt=PROMPT_TOKENS, step_s=1e-5, hold=True)
    load = Load(fleet=fleet, batch=32, started=32, in_flight=32 * GROUP_SIZE, together=True)
    cost = asyncio.run(run_load(load, keep=True))
    assert sorted(check_samples(cost, fleet)) == list(range(32))
    assert cost.served.most == [load.in_flight // ENGINES] * ENGINES
    assert cost.served.connections < load.in_flight / 8
