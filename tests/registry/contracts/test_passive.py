"""The costlier rules, which a run checks on its first batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slime.errors import PluginContractError
from slime.plugin import Generation, Reward
from slime.registry.contracts import (
    check_samples_untouched,
    check_tokens_generated,
    copy_samples,
    recheck_rewards,
)
from slime.testing import make_sample


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
