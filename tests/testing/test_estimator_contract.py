"""The contract of estimators and their objectives names each broken rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.plugin import Advantages, EstimatorBatch, EstimatorSpec, TokenBatch
from slime.testing import assert_estimator_contract, make_batch, random_batch
from slime.train.loss import clipped_surrogate

GROUP = EstimatorSpec(name="x", factory="a:B", needs=frozenset({"group"}))
CRITIC = EstimatorSpec(name="x", factory="a:B", needs=frozenset({"critic"}))


class Plain:
    """Reward minus the mean of the batch."""

    def scalars(self, batch: EstimatorBatch) -> Tensor:
        return batch.rewards.float() - batch.rewards.float().mean()

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        scalars = self.scalars(batch)
        return Advantages([value * mask for value, mask in zip(scalars, batch.loss_masks, strict=True)])


class Centred(Plain):
    """Reward minus the mean of the group's rollouts."""

    def scalars(self, batch: EstimatorBatch) -> Tensor:
        rewards = batch.rewards.double()
        means = torch.zeros_like(rewards)
        for group in batch.group_ids.unique():
            rows = batch.group_ids == group
            rollouts = {int(i): float(r) for i, r in zip(batch.rollout_ids[rows], rewards[rows], strict=True)}
            values = list(rollouts.values())
            means[rows] = values[0] + sum(value - values[0] for value in values) / len(values)
        return (rewards - means).float()


class ByPlace(Plain):
    def scalars(self, batch: EstimatorBatch) -> Tensor:
        return batch.rewards - batch.rewards[0]


class ByNumber(Plain):
    def scalars(self, batch: EstimatorBatch) -> Tensor:
        return batch.rewards + batch.group_ids % 7


class Writes(Plain):
    def scalars(self, batch: EstimatorBatch) -> Tensor:
        return batch.rewards.sub_(1.0)


class Divides(Plain):
    def scalars(self, batch: EstimatorBatch) -> Tensor:
        return (batch.rewards - batch.rewards.mean()) / batch.rewards.std(correction=0)


class Unmasked(Plain):
    def advantages(self, batch: EstimatorBatch) -> Advantages:
        return Advantages([torch.ones_like(mask) for mask in batch.loss_masks])


class Half(Plain):
    def advantages(self, batch: EstimatorBatch) -> Advantages:
        return Advantages([mask.to(batch.rewards.dtype) for mask in batch.loss_masks])


class CountsSiblings(Centred):
    def scalars(self, batch: EstimatorBatch) -> Tensor:
        return super().scalars(replace(batch, rollout_ids=torch.arange(len(batch.rewards))))


class Moves(Plain):
    seen = 0

    def scalars(self, batch: EstimatorBatch) -> Tensor:
        self.seen += 1
        return batch.rewards * self.seen


def test_estimators_that_keep_the_contract_pass() -> None:
    assert_estimator_contract(Plain())
    assert_estimator_contract(Centred(), spec=GROUP)


@pytest.mark.parametrize(
    ("estimator", "rule", "detail"),
    [
        (ByPlace(), "order of the samples", "never by their position"),
        (ByNumber(), "names only", "other group and rollout numbers"),
        (Writes(), "does not change its input", "changed batch.rewards"),
        (Divides(), "one finite number per token", "given one sample"),
        (Unmasked(), "0 outside the mask", "because the token's loss mask is 0"),
        (Half(), "returns float32", "torch.bfloat16; expected torch.float32"),
        (Moves(), "same answer for the same batch", "the same batch twice"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Plain) else "",
)
def test_a_broken_rule_is_named(estimator: Plain, rule: str, detail: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_estimator_contract(estimator)
    [line] = [line for line in str(caught.value).splitlines() if rule in line]
    assert detail in line


def test_an_estimator_of_groups_gives_equal_rewards_exactly_zero() -> None:
    with pytest.raises(AssertionError, match="expected exactly 0"):
        assert_estimator_contract(Plain(), spec=GROUP)


def test_an_estimator_of_groups_counts_a_rollout_once() -> None:
    with pytest.raises(AssertionError, match="counts a rollout of several samples once"):
        assert_estimator_contract(CountsSiblings(), spec=GROUP)


def test_an_estimator_with_a_critic_gets_values_and_must_return_returns() -> None:
    class Critic(Plain):
        def advantages(self, batch: EstimatorBatch) -> Advantages:
            assert batch.values is not None and batch.kl is None
            answer = super().advantages(batch)
            return Advantages(answer.advantages, [value.float() for value in batch.values])

    assert_estimator_contract(Critic(), spec=CRITIC)
    with pytest.raises(AssertionError, match="returned no returns"):
        assert_estimator_contract(Plain(), spec=CRITIC)


# --- objectives ---------------------------------------------------------------------------------------


class Surrogate(Plain):
    """With the kernel's own objective."""

    def objective(self, tokens: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return clipped_surrogate(tokens)


class Reduced(Plain):
    def objective(self, tokens: TokenBatch) -> Any:
        return (-tokens.log_probs * tokens.advantages).mean(), {}


class Overflows(Plain):
    def objective(self, tokens: TokenBatch) -> Any:
        return (tokens.log_probs - tokens.old_log_probs).exp() ** 4 * tokens.advantages, {}


class SeesMasked(Plain):
    def objective(self, tokens: TokenBatch) -> Any:
        return -tokens.log_probs * (tokens.advantages + tokens.log_probs.mean()), {}


class SeesOthers(Plain):
    def objective(self, tokens: TokenBatch) -> Any:
        total = (tokens.log_ratio * tokens.loss_mask).sum() / tokens.loss_mask.sum()
        return -tokens.log_ratio * tokens.advantages + total, {}


class NoMetrics(Plain):
    def objective(self, tokens: TokenBatch) -> Any:
        return -tokens.log_ratio * tokens.advantages, {"ratio": torch.ones(())}


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_the_default_objective_keeps_the_contract(ratio: Any) -> None:
    assert_estimator_contract(Surrogate(), spec=EstimatorSpec(name="x", factory="a:B", ratio=ratio))


@pytest.mark.parametrize(
    ("estimator", "rule", "detail"),
    [
        (Reduced(), "one entry per token", "returned a loss of shape ()"),
        (NoMetrics(), "one entry per token", "the metric 'ratio' as ()"),
        (Overflows(), "finite loss and gradient at extreme ratios", "not finite"),
        (SeesMasked(), "outside the mask out of the gradient", "tokens whose mask is 0"),
        (SeesOthers(), "share a micro-batch", "belongs in advantages()"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Plain) else "",
)
def test_a_broken_rule_of_an_objective_is_named(estimator: Plain, rule: str, detail: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_estimator_contract(estimator)
    assert any(rule in line and detail in line for line in str(caught.value).splitlines()), caught.value


# --- batches ------------------------------------------------------------------------------------------


def test_make_batch_sets_the_numbers() -> None:
    batch = make_batch([[1.0, 0.0], [2.0]], masks=[[1], [1, 0], [1, 1]], values=[[1], [2, 3], [4, 5]])
    assert batch.rewards.tolist() == [1.0, 0.0, 2.0]
    assert batch.group_ids.tolist() == [0, 0, 1]
    assert batch.rollout_ids.tolist() == [0, 1, 2]
    assert batch.values is not None and batch.values[1].tolist() == [2.0, 3.0]
    assert batch.kl is None


def test_a_random_batch_is_ragged_scattered_and_the_same_for_its_seed() -> None:
    batch, again = random_batch((4, 2), 3, siblings=True, kl=True), random_batch((4, 2), 3, siblings=True, kl=True)
    assert sorted(batch.group_ids.unique(return_counts=True)[1].tolist()) == [2, 4]
    assert sorted(batch.rollout_ids.unique(return_counts=True)[1].tolist()) == [2, 2, 2]
    assert batch.group_ids[:-1].ne(batch.group_ids[1:]).sum() > 1
    assert len({len(mask) for mask in batch.loss_masks}) > 1
    assert batch.rewards.equal(again.rewards)
    assert batch.kl is not None and [len(row) for row in batch.kl] == [len(mask) for mask in batch.loss_masks]
