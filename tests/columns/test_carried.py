"""Columns of single tokens on their way from generator and reward to the estimator, through checkpoints too."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.support.scoring import term
from tests.train.harness import make_batch

from slime.errors import PluginContractError
from slime.observe.timing import BusyClock
from slime.plugin import Advantages, EstimatorBatch, EstimatorSpec, Reward, RewardSpec
from slime.plugin.columns import BUILT_IN, check_columns
from slime.registry.contracts import Snapshot, check_cut_short, check_generated
from slime.rollout.scoring import Scorer
from slime.rollout.train_batch import Ragged, TrainBatch
from slime.run.checkpoint.files import read_rollout_part, write_rollout_part
from slime.testing import assert_estimator_contract, assert_reward_contract
from slime.testing.samples import make_sample
from slime.train.advantages import estimate
from slime.types import Group, Sample, Status

#: any float32, also signed zeros, subnormal numbers and NaN with a payload
FLOATS = arrays(np.uint32, st.integers(0, 40)).map(lambda bits: bits.view(np.float32))


def bits(column: Any) -> list[int]:
    return np.asarray(column, dtype=np.float32).view(np.uint32).tolist()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(columns=st.dictionaries(st.text(min_size=1), FLOATS, max_size=3))
def test_columns_survive_json_to_the_bit(columns: dict[str, np.ndarray[Any, Any]]) -> None:
    sample = Sample(columns=columns, response="x")
    for row in (sample.to_dict(), sample.to_row()):
        again = Sample.from_dict(json.loads(json.dumps(row)))
        assert {name: bits(column) for name, column in again.columns.items()} == {
            name: bits(column) for name, column in columns.items()
        }
        assert all(column.dtype == np.float32 for column in again.columns.values())
    assert Sample.from_dict(Sample().to_dict()).columns == {}


def test_a_checkpoint_keeps_a_buffered_and_a_half_finished_sample(tmp_path: Path) -> None:
    odd = np.array([0x7FC00001, 0x80000000, 0x00000001], dtype=np.uint32).view(np.float32)
    finished = make_sample(response="abc", columns={"credit": odd})
    begun = make_sample(response="ab", columns={"doubt": odd[:2]}, status=Status.PENDING)
    rows = [{"index": 0, "samples": [finished.to_dict(), begun.to_dict()]}]
    write_rollout_part(tmp_path, {"groups": rows, "source": {}})
    [group] = read_rollout_part(tmp_path)["groups"]
    one, two = (Sample.from_dict(row) for row in group["samples"])
    assert bits(one.columns["credit"]) == bits(odd)
    assert bits(two.columns["doubt"]) == bits(odd[:2])
    assert two.response_length == 2


# --- the boundary around generators ---------------------------------------------------------------


def generated(columns: Any, **fields: Any) -> Sample:
    sample = make_sample(response="abc", index=7, columns=columns, **fields)
    [checked] = check_generated([sample], Snapshot.of(make_sample(response=None, index=7)))
    return checked


def test_a_generators_columns_become_float32_of_their_own() -> None:
    given_away = np.array([0.5, np.nan, 2.0])
    found = generated({"doubt": given_away, "turn": [0, 0, 1], "sure": torch.tensor([True, False, True])}).columns
    given_away[0] = 9.0
    assert {name: column.dtype for name, column in found.items()} == dict.fromkeys(found, np.dtype(np.float32))
    assert bits(found["doubt"]) == bits([0.5, np.nan, 2.0])
    assert found["turn"].tolist() == [0, 0, 1] and found["sure"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"doubt": [1.0, 2.0]}, r"column 'doubt' of sample 7 as 2 numbers, expected one for each of its 3 response"),
        ({"doubt": [[1.0, 2.0, 3.0]]}, r"column 'doubt' of sample 7 as an array of shape \[1, 3\]"),
        ({"doubt": 1.0}, r"column 'doubt' of sample 7 as an array of shape \[\]"),
        ({"doubt": [1.0, float("-inf"), 0.0]}, r"column 'doubt' of sample 7 with an infinite value at token 1"),
        ({"doubt": [1.0, 1e300, 0.0]}, r"with an infinite value at token 1"),
        ({"doubt": ["a", "b", "c"]}, r"column 'doubt' of sample 7 that is not a list of numbers: could not convert"),
        ({"my doubt": [1, 2, 3]}, r"names a column 'my doubt', expected letters, digits and underscores"),
        ({"": [1, 2, 3]}, r"names a column ''"),
        ({3: [1, 2, 3]}, r"names a column 3"),
        ({"entropy": [1, 2, 3]}, r"names a column 'entropy', which is a name of slime's own"),
        ({"pieces": [1, 2, 3]}, r"names a column 'pieces', which is a name of slime's own"),
        ({"source": [0, 1, 5]}, r"column 'source' of sample 7 with other numbers than 0 \(policy\), 1 \(tool\)"),
        ([1, 2, 3], r"returned columns of sample 7 as list, expected a dict"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns: Any, message: str) -> None:
    with pytest.raises(PluginContractError, match=message):
        generated(columns)


def test_every_built_in_name_is_refused_to_rewards() -> None:
    for name in BUILT_IN:
        with pytest.raises(PluginContractError, match=f"names a column '{name}'"):
            check_columns({name: [0.0]}, 1)


def test_a_failed_sample_loses_its_columns_and_keeps_its_reason() -> None:
    sample = generated({"doubt": [1.0]}, status=Status.FAILED, failure="the tool broke")
    assert (sample.columns, sample.failure) == ({}, "the tool broke")


def test_columns_of_a_response_that_was_cut_short_fit_the_part_and_then_the_whole() -> None:
    pending = make_sample(response=None, index=7)
    asked = Snapshot.of(pending)
    part = make_sample(response="ab", index=7, status=Status.ABORTED, columns={"doubt": [1.0, 2.0]})
    check_cut_short(check_generated([part], asked), asked)
    part.status = Status.PENDING
    continued = Snapshot.of(part)
    whole = replace(make_sample(response="abc", index=7), columns=part.columns)
    with pytest.raises(PluginContractError, match=r"column 'doubt' of sample 7 as 2 numbers, expected .* its 3 resp"):
        check_generated([whole], continued)
    whole.columns = {"doubt": [*part.columns["doubt"], 3.0]}  # type: ignore[dict-item]  # as a generator may give it
    [checked] = check_generated([whole], continued)
    assert checked.columns["doubt"].tolist() == [1.0, 2.0, 3.0]


# --- the boundary around rewards --------------------------------------------------------------------


class Gives:
    """Gives every sample the same reward, or what a function makes of it."""

    def __init__(self, make: Callable[[Sample], Reward]) -> None:
        self.make = make

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        return [self.make(sample) for sample in samples]


SPEC = RewardSpec(name="r", factory="nowhere:R")


def scored(*rewards: Gives, keys: Sequence[str | None] = (None,), **fields: Any) -> Sample:
    sample = make_sample(response="abc", index=7, **fields)
    terms = [term(one, SPEC, f"reward r{n}", key=key) for n, (one, key) in enumerate(zip(rewards, keys, strict=True))]
    asyncio.run(Scorer(terms).score([sample], BusyClock()))
    return sample


def test_a_rewards_columns_are_added_to_the_generators() -> None:
    before = {"doubt": np.zeros(3, dtype=np.float32)}
    sample = scored(Gives(lambda _: Reward(1.0, columns={"credit": [0.0, 0.5, float("nan")]})), columns=before)
    assert set(before) == {"doubt"}
    assert set(sample.columns) == {"doubt", "credit"}
    assert bits(sample.columns["credit"]) == bits([0.0, 0.5, np.nan])
    assert sample.reward == 1.0


def test_columns_of_several_rewards_are_named_after_them() -> None:
    one = Gives(lambda _: Reward(1.0, columns={"credit": [1, 1, 1]}))
    two = Gives(lambda _: Reward(1.0, columns={"credit": [2, 2, 2]}))
    sample = scored(one, two, keys=("a", "b"))
    assert {name: column.tolist() for name, column in sample.columns.items()} == {
        "a/credit": [1, 1, 1],
        "b/credit": [2, 2, 2],
    }


@pytest.mark.parametrize(
    ("columns", "before", "message"),
    [
        (
            {"credit": [1.0]},
            {},
            r"reward r0 returned column 'credit' of sample 7 as 1 numbers, expected .* its 3 resp",
        ),
        ({"ratio": [1.0, 1.0, 1.0]}, {}, r"reward r0 names a column 'ratio'"),
        ({"source": [0, 0, 0]}, {}, r"reward r0 names a column 'source'"),
        ({"doubt": [1, 1, 1]}, {"doubt": [0, 0, 0]}, r"reward r0 named a column 'doubt', and the generator had before"),
    ],
)
def test_a_reward_whose_columns_do_not_fit_loses_the_sample(
    columns: dict[str, Any], before: dict[str, Any], message: str
) -> None:
    sample = scored(Gives(lambda _: Reward(1.0, columns=columns)), columns=before)
    assert sample.status is Status.FAILED
    assert re.search(message, sample.failure or "")


def test_the_contract_kit_knows_columns_of_rewards() -> None:
    assert_reward_contract(Gives(lambda one: Reward(1.0, columns={"credit": [0.5] * one.response_length})))
    with pytest.raises(AssertionError, match=r"column 'credit' of sample \d+ as 2 numbers, expected one for each"):
        assert_reward_contract(Gives(lambda _: Reward(1.0, columns={"credit": [1.0, 1.0]})))
    drawn = iter(range(10_000))
    with pytest.raises(AssertionError, match="another column 'credit' the second time"):
        assert_reward_contract(Gives(lambda one: Reward(1.0, columns={"credit": [next(drawn)] * one.response_length})))


# --- the batch and the estimator ----------------------------------------------------------------------


def test_the_batch_has_the_columns_of_trainable_samples() -> None:
    credit = np.array([1.0, np.nan, 3.0], dtype=np.float32)
    samples = [
        make_sample(response="abc", index=0, columns={"credit": credit}),
        make_sample(response="x", index=1, status=Status.FAILED),
        make_sample(response="ab", index=2, columns={"doubt": np.array([5.0, 6.0], dtype=np.float32)}),
    ]
    batch = TrainBatch.from_groups([Group(0, samples), Group(1, [replace(samples[0])])], rollout=0, num_steps=1)
    assert {name: [bits(part) for part in parts] for name, parts in batch.columns.items()} == {
        "credit": [bits(credit), bits([np.nan] * 2), bits(credit)],
        "doubt": [bits([np.nan] * 3), bits([5.0, 6.0]), bits([np.nan] * 3)],
    }
    assert batch.incomplete.tolist() == [True, True, False]


def test_a_column_of_another_length_is_refused_by_the_batch() -> None:
    sample = make_sample(response="abc", index=5, columns={"credit": np.zeros(2, dtype=np.float32)})
    with pytest.raises(ValueError, match="sample 5 of group 0 has 2 numbers in column 'credit', expected 3"):
        TrainBatch.from_groups([Group(0, [sample])], rollout=0, num_steps=1)


class ByCredit:
    """The column `credit` where a token is trained on."""

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        pairs = zip(batch.columns["credit"], batch.loss_masks, strict=True)
        return Advantages([credit.nan_to_num() * mask for credit, mask in pairs])


def credited() -> TrainBatch:
    batch = make_batch(samples=4, rollout_log_probs=True)
    rng = np.random.default_rng(3)
    return replace(
        batch, columns={"credit": Ragged.of([rng.normal(size=n) for n in batch.response_lengths], np.float32)}
    )


def test_the_estimator_gets_columns_in_any_order_of_the_samples() -> None:
    batch = credited()
    found = estimate(ByCredit(), batch, needs={"credit"}, passive=True).advantages
    for values, credit, mask in zip(found, batch.columns["credit"], batch.loss_masks, strict=True):
        assert bits(values) == bits(credit * mask)


def test_the_estimator_gets_the_engines_log_probs() -> None:
    batch, seen = credited(), []

    class Looks(ByCredit):
        def advantages(self, batch: EstimatorBatch) -> Advantages:
            seen.append(batch.columns["engine_logprob"])
            return super().advantages(batch)

    estimate(Looks(), batch)
    assert batch.rollout_log_probs is not None
    assert [bits(part) for part in seen[0]] == [bits(part) for part in batch.rollout_log_probs]


def test_an_estimator_must_not_change_columns() -> None:
    class Scribbles(ByCredit):
        def advantages(self, batch: EstimatorBatch) -> Advantages:
            batch.columns["credit"][1][0] = 7.0
            return super().advantages(batch)

    with pytest.raises(PluginContractError, match=r"changed batch\.columns"):
        estimate(Scribbles(), credited())


def test_a_missing_column_is_named_before_the_estimator_is_asked() -> None:
    with pytest.raises(
        PluginContractError, match=r"ByCredit reads the column 'credit', which no sample of rollout 0 has; columns: non"
    ):
        estimate(ByCredit(), make_batch(), needs={"credit"})


def test_the_contract_kit_gives_an_estimator_the_columns_that_it_declares() -> None:
    spec = EstimatorSpec(name="it", factory="nowhere:E", columns=frozenset({"credit"}))
    assert_estimator_contract(ByCredit(), spec=spec)
    with pytest.raises(AssertionError, match="KeyError: 'credit'"):
        assert_estimator_contract(ByCredit())
