"""Each estimator on numbers calculated by hand."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch

from slime.errors import ConfigError, PluginContractError
from slime.plugin import Context, TokenBatch
from slime_estimators.dapo import DAPO
from slime_estimators.options import DAPOOptions
from tests.estimators.support import SPECS, batch_of, make, scalars, tokens


def test_dr_grpo_only_subtracts_the_mean() -> None:
    assert scalars("dr_grpo", [3, 5, 10]) == [-3, -1, 4]


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    # 3 - (5 + 10) / 2, 5 - (3 + 10) / 2, 10 - (3 + 5) / 2
    assert scalars("rloo", [3, 5, 10]) == [-4.5, -1.5, 6.0]


def test_rloo_subtracts_the_kl_of_the_whole_response() -> None:
    batch = batch_of([3, 5], [0, 0], [[1, 0, 1], [1]], kl=[[1.0, 50.0, 2.0], [4.0]])
    # rewards 3 - (1 + 2) / 2 = 1.5 and 5 - 4 / 2 = 3
    assert tokens("rloo", batch, kl_coef=0.5) == [[-1.5, 0, -1.5], [1.5]]


@pytest.mark.parametrize("name", ["gspo", "cispo", "dapo"])
def test_gspo_and_cispo_have_the_advantages_of_grpo(name: str) -> None:
    assert scalars(name, [3, 5, 10, 1], [0, 0, 0, 1]) == scalars("grpo", [3, 5, 10, 1], [0, 0, 0, 1])


def test_needs_and_ratios_of_the_specs() -> None:
    assert SPECS["gspo"].ratio == "sequence"
    assert [name for name, spec in SPECS.items() if spec.ratio == "sequence"] == ["gspo"]
    assert [name for name, spec in SPECS.items() if "critic" in spec.needs] == ["ppo"]
    assert "group" not in SPECS["reinforce_plus_plus"].needs
    ranges = {name: spec.clip_range for name, spec in SPECS.items() if spec.clip_range != (0.2, 0.2)}
    assert ranges == {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0), "dapo": (0.2, 0.28)}


# Values 0.5 0.2 0.4, reward 1. With gamma 0.9, lambda 0.5: errors 1 - 0.4, 0.9 * 0.4 - 0.2, 0.9 * 0.2 - 0.5.
ERRORS = [-0.32, 0.16, 0.6]
GAE = [-0.32 + 0.45 * 0.43, 0.16 + 0.45 * 0.6, 0.6]


@pytest.mark.parametrize(
    ("gamma", "lambd", "expected"),
    [(0.9, 0.5, GAE), (0.9, 0.0, ERRORS), (1.0, 1.0, [0.5, 0.8, 0.6]), (0.0, 1.0, [-0.5, -0.2, 0.6])],
)
def test_ppo(gamma: float, lambd: float, expected: list[float]) -> None:
    values = [[0.5, 0.2, 0.4]]
    answer = make("ppo", gamma=gamma, lambd=lambd).advantages(batch_of([1], masks=[[1, 1, 1]], values=values))
    assert answer.advantages[0].tolist() == pytest.approx(expected)
    assert answer.returns[0].tolist() == pytest.approx([a + v for a, v in zip(expected, values[0], strict=True)])


def test_ppo_skips_masked_tokens_and_subtracts_kl_elsewhere() -> None:
    batch = batch_of([1], masks=[[1, 0, 0, 1, 1, 0]], values=[[0.5, 9, 9, 0.2, 0.4, 9]], kl=[[0.1, 7, 7, 0.2, 0.3, 7]])
    answer = make("ppo", gamma=0.9, lambd=0.5, kl_coef=2.0).advantages(batch)
    errors = [-0.32 - 0.2, 0.16 - 0.4, 0.6 - 0.6]
    second = errors[1] + 0.45 * errors[2]
    assert answer.advantages[0].tolist() == pytest.approx(
        [errors[0] + 0.45 * second, 0, 0, second, errors[2], 0], abs=1e-6
    )
    assert answer.returns[0].tolist() == pytest.approx(
        [errors[0] + 0.45 * second + 0.5, 0, 0, second + 0.2, errors[2] + 0.4, 0]
    )


def test_ppo_without_values_raises_an_error() -> None:
    batch = batch_of([1])
    object.__setattr__(batch, "values", None)
    with pytest.raises(PluginContractError, match=r"batch\.values is None; expected the critic's value"):
        make("ppo").advantages(batch)


@pytest.mark.parametrize("name", ["ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo"])
def test_a_coefficient_without_kl_is_named(name: str) -> None:
    batch = batch_of([1, 2])
    object.__setattr__(batch, "kl", None)
    make(name).advantages(batch)
    with pytest.raises(PluginContractError, match=r"batch\.kl is None with --kl-coef 0\.1"):
        make(name, kl_coef=0.1).advantages(batch)


def test_reinforce_plus_plus_whitens_over_the_batch() -> None:
    # mean 2, unbiased variance 2, for any groups
    assert scalars("reinforce_plus_plus", [1, 3], [0, 1]) == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])


def test_reinforce_plus_plus_discounts_returns_and_subtracts_kl() -> None:
    batch = batch_of([4, 0], [0, 1], [[1, 0, 1], [1, 0]], kl=[[1.0, 9.0, 2.0], [3.0, 9.0]])
    # token rewards -0.5, 4 - 1 and -1.5; returns -0.5 + 0.5 * 3, 3, -1.5; mean 5 / 6
    deviation = math.sqrt(sum((x - 5 / 6) ** 2 for x in (1, 3, -1.5)) / 2)
    got = tokens("reinforce_plus_plus", batch, gamma=0.5, kl_coef=0.5)
    assert got[0] == pytest.approx([(1 - 5 / 6) / deviation, 0, (3 - 5 / 6) / deviation])
    assert got[1] == pytest.approx([(-1.5 - 5 / 6) / deviation, 0])


def test_reinforce_plus_plus_puts_the_reward_on_the_last_trained_token() -> None:
    batch = batch_of([2, 0], [0, 1], [[1, 1, 0], [1, 0, 0]])
    got = tokens("reinforce_plus_plus", batch, gamma=0.0)
    # token rewards 0 2 and 0: mean 2 / 3, unbiased variance 4 / 3
    low, high = -2 / 3 / math.sqrt(4 / 3), 4 / 3 / math.sqrt(4 / 3)
    assert got[0] == pytest.approx([low, high, 0])
    assert got[1] == pytest.approx([low, 0, 0])


def test_reinforce_plus_plus_baseline_subtracts_the_group_mean_and_whitens() -> None:
    # centred -1 1 and 0 0: mean 0, unbiased variance 2 / 3
    expected = [-math.sqrt(1.5), math.sqrt(1.5), 0, 0]
    assert scalars("reinforce_plus_plus_baseline", [1, 3, 5, 5], [0, 0, 1, 1]) == pytest.approx(expected)


def test_reinforce_plus_plus_baseline_subtracts_each_tokens_kl() -> None:
    batch = batch_of([1, 1], [0, 0], [[1, 1], [1]], kl=[[2.0, 4.0], [0.0]])
    # -1 -2 0: mean -1, unbiased variance 1
    got = tokens("reinforce_plus_plus_baseline", batch, kl_coef=0.5)
    assert got[0] == pytest.approx([0, -1], abs=1e-6)
    assert got[1] == pytest.approx([1])


def test_dapo_penalizes_overlong_answers() -> None:
    # full length 10, buffer 4: 6 tokens cost nothing, 8 half, 10 and 12 all of 0.5
    masks = [[1] * length for length in (6, 8, 10, 12)]
    batch = batch_of([1, 1, 1, 1], masks=masks)
    got = [part[0] for part in tokens("dapo", batch, longest=10, overlong_buffer=4, overlong_penalty=0.5)]
    centred = [0.3125, 0.0625, -0.1875, -0.1875]  # of rewards 1, 0.75, 0.5, 0.5
    deviation = math.sqrt(sum(c * c for c in centred) / 3)
    assert got == pytest.approx([c / (deviation + 1e-6) for c in centred])
    assert not any(map(any, tokens("dapo", batch, longest=10)))


def test_a_buffer_of_one_token_penalizes_only_answers_of_full_length() -> None:
    batch = batch_of([1, 1], masks=[[1] * 9, [1] * 10])
    got = [part[0] for part in tokens("dapo", batch, longest=10, overlong_buffer=1)]
    assert got == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2)], rel=1e-5)


def test_dapo_counts_masked_tokens_in_the_length() -> None:
    batch = batch_of([1, 1], masks=[[1, 0, 0, 0], [1]])
    got = [part[0] for part in tokens("dapo", batch, longest=4, overlong_buffer=2)]
    assert got == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)], rel=1e-5)


def test_dapo_with_a_buffer_needs_a_run() -> None:
    outside = Context(seed=0, run_dir=Path(), logger=logging.getLogger("test"))
    with pytest.raises(ConfigError, match="--rollout-max-response-len"):
        DAPO(DAPOOptions(overlong_buffer=4), outside)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "low", "high"),
    [
        (1.0, 2.0, 1.0, 0, 0),
        (3.0, 2.0, 1.28, 0, 1),
        (3.0, -2.0, 1.28, 0, 1),
        (0.5, 2.0, 0.8, 1, 0),
        (0.5, -1.0, 0.8, 1, 0),
    ],
)
def test_cispo_clips_the_weight_and_keeps_the_gradient(
    ratio: float, advantage: float, weight: float, low: int, high: int
) -> None:
    log_probs = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    old = torch.tensor([-1.0])
    batch = TokenBatch(
        log_probs=log_probs,
        old_log_probs=old,
        log_ratio=log_probs - old,
        advantages=torch.tensor([advantage]),
        loss_mask=torch.ones(1),
        sequence_ids=torch.zeros(1, dtype=torch.int64),
        num_sequences=1,
        eps_clip=0.2,
        eps_clip_high=0.28,
    )
    loss, metrics = make("cispo").objective(batch)
    (slope,) = torch.autograd.grad(loss.sum(), log_probs)
    assert loss.item() == pytest.approx(-weight * advantage * log_probs.item())
    assert slope.item() == pytest.approx(-weight * advantage)
    assert (metrics["clip_fraction_low"].item(), metrics["clip_fraction_high"].item()) == (low, high)
    assert metrics["clip_fraction"].item() == low + high


def test_cispo_counts_no_weight_that_is_exactly_at_a_bound() -> None:
    at_one = TokenBatch(
        log_probs=torch.tensor([-1.0]),
        old_log_probs=torch.tensor([-1.0]),
        log_ratio=torch.zeros(1),
        advantages=torch.ones(1),
        loss_mask=torch.ones(1),
        sequence_ids=torch.zeros(1, dtype=torch.int64),
        num_sequences=1,
        eps_clip=0.0,
        eps_clip_high=0.0,
    )
    _, metrics = make("cispo").objective(at_one)
    assert [values.item() for values in metrics.values()] == [0.0, 0.0, 0.0]
