"""The estimator's input, and errors if it breaks its contract."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.harness import Centred, make_batch

from slime.errors import PluginContractError, PluginError
from slime.plugin import Advantages, EstimatorBatch
from slime.train.advantages import NamedEstimator, advantage_metrics, estimate
from slime.train.loss import policy_loss


class Answer:
    """An estimator that applies a function to the batch."""

    def __init__(self, make: Callable[[EstimatorBatch], object]) -> None:
        self.make = make

    def advantages(self, batch: EstimatorBatch) -> object:
        return self.make(batch)


def good(batch: EstimatorBatch) -> list[torch.Tensor]:
    return [mask.clone() for mask in batch.loss_masks]


def changed(batch: EstimatorBatch, sample: int, token: int, value: float) -> Advantages:
    values = good(batch)
    values[sample][token] = value
    return Advantages(values)


def test_advantages_are_returned_per_token() -> None:
    batch = make_batch(samples=4, group=2)
    values = estimate(Centred(), batch).advantages
    mean = batch.rewards[:2].mean()
    for value, mask in zip(values[0].tolist(), batch.loss_masks[0].tolist(), strict=True):
        assert value == pytest.approx((float(batch.rewards[0]) - mean) * mask, abs=1e-6)


def test_the_estimator_gets_kl_if_there_is_a_reference() -> None:
    batch = make_batch(samples=4)
    seen: list[EstimatorBatch] = []
    kl = torch.full((len(batch.loss_masks.flat),), 0.5)
    estimate(Answer(lambda b: seen.append(b) or Advantages(good(b))), batch, kl)
    assert seen[0].kl is not None
    assert [len(part) for part in seen[0].kl] == batch.response_lengths.tolist()
    assert torch.equal(torch.cat(list(seen[0].kl)), kl)


def test_the_estimator_gets_parts_of_rewards_and_metadata_of_each_sample() -> None:
    """Also in another order, and whatever it does to the metadata."""

    def by_part(batch: EstimatorBatch) -> Advantages:
        levels = [row.pop("level") for row in batch.metadata]
        assert levels == [0.0 if torch.isnan(part) else float(part) for part in batch.reward_parts["fmt"]]
        return Advantages([mask * level for mask, level in zip(batch.loss_masks, levels, strict=True)])

    parts = np.array([1, 2, 3, np.nan], dtype=np.float32)
    levels: list[dict[str, Any]] = [{"level": level} for level in (1, 2, 3, 0)]
    batch = replace(make_batch(samples=4, group=2), reward_parts={"fmt": parts}, metadata=copy.deepcopy(levels))
    found = estimate(Answer(by_part), batch, passive=True).advantages
    assert [float(part.max()) for part in found[:3]] == [1.0, 2.0, 3.0]
    assert batch.metadata == levels


class CountsCopies:
    """Metadata that counts its copies."""

    def __init__(self) -> None:
        self.copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> CountsCopies:
        self.copies += 1
        return self


def test_metadata_is_copied_for_an_estimator_that_reads_it_only() -> None:
    """It can hold whole conversations."""
    rows = [{"messages": CountsCopies()} for _ in range(4)]
    batch = replace(make_batch(samples=4, group=2), metadata=rows)
    estimate(Centred(), batch, passive=True)
    assert [row["messages"].copies for row in rows] == [0] * 4

    def reads(given: EstimatorBatch) -> Advantages:
        assert len(given.metadata) == 4 and given.metadata[-1] is given.metadata[3] is not rows[3]
        assert [list(row) for row in given.metadata[2:]] == [["messages"]] * 2
        return Advantages(good(given))

    estimate(Answer(reads), batch)
    assert [row["messages"].copies for row in rows] == [0, 0, 1, 1]


def test_parts_of_rewards_must_not_be_changed() -> None:
    def scribbled(batch: EstimatorBatch) -> Advantages:
        batch.reward_parts["fmt"][0] = 7
        return Advantages(good(batch))

    parts = {"fmt": np.array([1, 2, np.nan, 3], dtype=np.float32)}
    batch = replace(make_batch(samples=4), reward_parts=parts)
    with pytest.raises(PluginContractError, match=r"changed batch\.reward_parts"):
        estimate(Answer(scribbled), batch)
    estimate(Answer(lambda one: Advantages(good(one))), batch)


class ByPlace:
    """Advantages that depend on the samples' positions; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        self.calls += 1
        return Advantages([mask * place for place, mask in enumerate(batch.loss_masks)])


def test_passive_checks_find_dependence_on_the_order() -> None:
    batch, estimator = make_batch(samples=4), ByPlace()
    estimate(estimator, batch)
    assert estimator.calls == 1
    with pytest.raises(PluginContractError, match=r"ByPlace\.advantages .* in another order"):
        estimate(estimator, batch, passive=True)
    estimate(Centred(), batch, passive=True)


def scribble(batch: EstimatorBatch) -> Advantages:
    batch.rewards.add_(1)
    return Advantages(good(batch))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda b: good(b), "returned list; expected slime.plugin.Advantages"),
        (lambda b: Advantages(good(b)[:-1]), "returned 3 advantages; expected one tensor for each of 4 samples"),
        (
            lambda b: Advantages([v[None] for v in good(b)]),
            r"sample 0 as \(1, \d+\); expected .* mask's shape",
        ),
        (lambda _: Advantages([0.0] * 4), "sample 0 as float"),
        (lambda b: changed(b, 2, 1, float("nan")), "sample 2: token 1 is nan; expected finite"),
        (
            lambda b: changed(b, 3, 0, 0.5),
            "sample 3: token 0 is 0.5; expected 0, because the token's loss mask",
        ),
        (scribble, r"changed batch\.rewards"),
    ],
    ids=[
        "no Advantages",
        "a sample short",
        "wrong shape",
        "no tensor",
        "nan",
        "not zero where masked",
        "input changed",
    ],
)
def test_a_contract_violation_names_estimator_token_found_and_expected(
    make: Callable[[EstimatorBatch], object], message: str
) -> None:
    batch = make_batch(samples=4, response=(3, 9))
    with pytest.raises(PluginContractError, match=message) as error:
        estimate(Answer(make), batch)
    assert "Answer.advantages" in str(error.value)


class Raising:
    """An estimator that fails."""

    def advantages(self, batch: EstimatorBatch) -> Advantages:  # noqa: ARG002 - the interface
        raise SystemExit("no advantage")

    def objective(self, tokens: Any) -> Any:  # noqa: ARG002 - the interface
        raise KeyError("no loss")


def test_an_estimator_that_raises_is_named_with_package_and_line() -> None:
    estimator = NamedEstimator(Raising(), "estimator mine/raising (slime-mine 1.2)")
    line = Raising.advantages.__code__.co_firstlineno + 1
    message = rf"^estimator mine/raising \(slime-mine 1.2\).advantages: {__file__}:{line}: SystemExit: no advantage\n"
    with pytest.raises(PluginError, match=message):
        estimate(estimator, make_batch(samples=4))
    tokens: Any = SimpleNamespace(log_probs=torch.zeros(3))
    with pytest.raises(PluginError, match=rf"\(slime-mine 1.2\).objective: {__file__}:\d+: KeyError: 'no loss'"):
        policy_loss(tokens, estimator)


def test_a_named_estimator_has_an_objective_only_if_its_estimator_has_one() -> None:
    assert hasattr(NamedEstimator(Raising(), "x"), "objective")
    assert not hasattr(NamedEstimator(Centred(), "x"), "objective")


def test_a_step_is_taken_if_any_token_of_it_is_trained() -> None:
    from slime.train.step import steps_of

    batch = make_batch(samples=6, steps=3, masked=False, response=(3, 3))
    for sample, mask in enumerate(batch.loss_masks):
        mask[:] = 0
        mask[1] = sample < 3  # one token of each sample of step 0, and of one of the two of step 1
    assert steps_of(batch) == ([0, 1], [2])


def test_the_metrics_of_advantages_are_those_of_the_trained_tokens() -> None:
    batch = make_batch(samples=2, masked=False, response=(3, 3))
    batch.loss_masks[0][1] = 0
    batch.loss_masks[1][:] = [0, 1, 0]
    values = torch.tensor([1.0, 9.0, -2.0, 9.0, 0.0, 9.0])
    assert advantage_metrics(values, torch.tensor(batch.loss_masks.flat)) == pytest.approx(
        {
            "advantage_mean": -1 / 3,
            "advantage_std": (14 / 9) ** 0.5,
            "advantage_min": -2.0,
            "advantage_max": 1.0,
            "advantage_zero_fraction": 1 / 3,
        }
    )
    for mask in batch.loss_masks:
        mask[:] = 0
    assert advantage_metrics(values, torch.tensor(batch.loss_masks.flat)) == {}
