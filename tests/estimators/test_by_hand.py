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


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_without_normalization_only_the_mean_is_subtracted(name: str) -> None:
    options = {"std_normalization": False} if name == "grpo" else {}
    assert scalars(name, [3, 5, 10], **options) == [-3, -1, 4]


def test_grpo_divides_by_the_unbiased_deviation_of_the_group() -> None:
    # rewards 1 0 0 1: mean 1/2, squared deviations sum to 1, unbiased variance 1/3
    half = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert scalars("grpo", [1, 0, 0, 1]) == pytest.approx([half, -half, -half, half], rel=1e-6)
    assert scalars("grpo", [0, 2], eps=1.0) == pytest.approx([-1 / (math.sqrt(2) + 1), 1 / (math.sqrt(2) + 1)])


def test_groups_may_be_ragged_and_scattered() -> None:
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    expected = [half, -1 / math.sqrt(2), -half, 0, 1 / math.sqrt(2)]
    assert scalars("grpo", [1, 5, 0, 9, 7], [4, 2, 4, 11, 2]) == pytest.approx(expected, rel=1e-5)


def test_a_fully_masked_sample_still_counts_in_the_statistics() -> None:
    batch = batch_of([0, 4, 8], masks=[[1, 0, 1], [0, 1], [0]])
    assert tokens("grpo", batch, std_normalization=False) == [[-4, 0, -4], [0, 0], [0]]


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


@pytest.mark.parametrize("name", ["ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo"])
def test_a_coefficient_without_kl_is_named(name: str) -> None:
    batch = batch_of([1, 2])
    object.__setattr__(batch, "kl", None)
    make(name).advantages(batch)
    with pytest.raises(PluginContractError, match=r"batch\.kl is None with --kl-coef 0\.1"):
        make(name, kl_coef=0.1).advantages(batch)


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


def test_dapo_with_a_buffer_needs_a_run() -> None:
    outside = Context(seed=0, run_dir=Path(), logger=logging.getLogger("test"))
    with pytest.raises(ConfigError, match="--rollout-max-response-len"):
        DAPO(DAPOOptions(overlong_buffer=4), outside)


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
