"""The costlier rules, which a run checks on its first batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slime.errors import PluginContractError
from slime.plugin import Advantages, EstimatorBatch, Generation, Reward
from slime.registry.contracts import (
    check_samples_untouched,
    check_tokens_generated,
    copy_samples,
    recheck_rewards,
)
from slime.registry.estimator_contract import check_permutation, copy_batch
from slime.testing import make_batch, make_sample, random_batch


def test_equal_rewards_on_the_second_call_pass() -> None:
    recheck_rewards([Reward(1.0, {"a": 1e6})], [Reward(1.0, {"a": 1e6 + 0.1})])


@pytest.mark.parametrize(
    ("again", "message"),
    [
        ([Reward(1.0)], "returned 2 rewards, then 1"),
        ([Reward(1.0), Reward(0.5)], r"scored sample 1 with value = 0\.0, then with value = 0\.5"),
        ([Reward(1.0, {"a": 1.0}), Reward(0.0)], r"scored sample 0 with a = None, then with a = 1\.0"),
    ],
)
def test_a_reward_that_is_not_deterministic_is_named(again: list[Reward], message: str) -> None:
    with pytest.raises(PluginContractError, match=message):
        recheck_rewards([Reward(1.0), Reward(0.0)], again)


def test_changes_to_a_sample_are_found_in_every_field_and_depth() -> None:
    samples = [make_sample(metadata={"a": [1]}), make_sample(multimodal_inputs={"pixels": np.zeros(3)})]
    before = copy_samples(samples)
    check_samples_untouched(before, samples)
    samples[1].multimodal_inputs["pixels"][0] = 1
    with pytest.raises(PluginContractError, match=r"changed Sample\.multimodal_inputs of sample 1"):
        check_samples_untouched(before, samples)
    samples[0].metadata["a"].append(2)
    with pytest.raises(PluginContractError, match=r"changed Sample\.metadata of sample 0"):
        check_samples_untouched(before, samples)


class First:
    """Relative to the first sample of the batch."""

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        base = batch.rewards[0]
        return Advantages([(r - base) * m for r, m in zip(batch.rewards, batch.loss_masks, strict=True)])


class Mean:
    """Relative to the mean, with returns."""

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        values = batch.rewards - batch.rewards.mean()
        advantages = [v * m for v, m in zip(values, batch.loss_masks, strict=True)]
        return Advantages(advantages, [part + 1 for part in advantages])


def test_a_result_that_depends_on_the_samples_passes_in_any_order() -> None:
    batch = random_batch((3, 4), 0)
    answer = Mean().advantages(batch)
    check_permutation(Mean(), batch, answer)
    check_permutation(Mean(), batch, answer, order=[3, 1, 0, 2, 6, 5, 4])


def test_a_result_that_depends_on_the_position_is_named() -> None:
    batch = make_batch([[1.0, 3.0]])
    with pytest.raises(PluginContractError, match=r"sample 1: token 0 is 2\.0, but 0\.0 when .* another order"):
        check_permutation(First(), batch, First().advantages(batch))


def test_permuting_copies_every_column() -> None:
    batch = random_batch((2, 2), 1, kl=True, values=True)
    permuted = copy_batch(batch, [3, 2, 1, 0])
    assert permuted.rewards.equal(batch.rewards.flip(0))
    assert permuted.values is not None and batch.values is not None and permuted.kl is not None
    assert permuted.values[0].equal(batch.values[3])
    permuted.values[0].zero_()
    assert not torch.equal(permuted.values[0], batch.values[3])


def answer(tokens: list[int]) -> Generation:
    return Generation(tokens, [-token / 8 for token in tokens], "stop", ["1"])


def test_tokens_of_several_answers_with_other_tokens_between_pass() -> None:
    sample = make_sample("ab", "cdefg", rollout_log_probs=[-1.0, -2.0, 0.0, -3.0, 0.0], loss_mask=[1, 1, 0, 1, 0])
    sample.tokens[2:] = [8, 16, 99, 24, 98]
    check_tokens_generated([sample], [answer([8, 16]), answer([24])])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": [1, 1, 1]}, "trains on response token 2, token 99 with log-prob 0"),
        ({"rollout_log_probs": [-1.0, -1.0, 0.0]}, "trains on response token 1, token 16 with log-prob -1"),
        ({"loss_mask": None, "rollout_log_probs": None}, "trains on response token 2, token 99, which"),
    ],
)
def test_a_token_that_the_policy_did_not_generate_is_named(change: dict[str, Any], message: str) -> None:
    fields = {"rollout_log_probs": [-1.0, -2.0, 0.0], "loss_mask": [1, 1, 0], **change}
    sample = make_sample("ab", "cde", **fields)
    sample.tokens[2:] = [8, 16, 99]
    with pytest.raises(PluginContractError, match=message):
        check_tokens_generated([sample], [answer([8, 16])])
