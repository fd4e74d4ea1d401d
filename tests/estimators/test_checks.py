"""Configurations with ignored options, or that would be a different algorithm, are refused."""

from __future__ import annotations

from typing import Any

import pytest

from slime.config.options import AlgorithmOptions, RolloutOptions
from slime.config.run_config import RunConfig
from slime.errors import ConfigError
from slime.registry.plugin_set import survey_plugins
from slime.registry.resolve import check_needs
from slime_estimators import slime_check_config


def config(name: str, *, options: dict[str, Any] | None = None, **algorithm: Any) -> RunConfig:
    return RunConfig(
        algorithm=AlgorithmOptions(advantage_estimator=name, **algorithm),
        rollout=RolloutOptions(rollout_max_response_len=64, n_samples_per_prompt=2),
        component_options={"estimator": options or {}},
    )


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "cispo", "dapo", "estimators/grpo"])
def test_kl_coef_is_refused_for_estimators_without_it(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--kl-coef 0\.1 subtracts KL from the reward.*Use --use-kl-loss"):
        check_needs(survey_plugins().find("estimator", name), config(name, kl_coef=0.1))


@pytest.mark.parametrize("name", ["ppo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_kl_coef_is_accepted_by_estimators_that_use_it(name: str) -> None:
    check_needs(survey_plugins().find("estimator", name), config(name, kl_coef=0.1))


def test_dr_grpo_needs_its_constant_length() -> None:
    with pytest.raises(ConfigError, match=r"Set --loss-constant-length \(the paper: the longest response, 64 here\)"):
        slime_check_config(config("dr_grpo"))
    slime_check_config(config("dr_grpo", loss_constant_length=64))


def test_dapo_needs_the_token_level_loss() -> None:
    with pytest.raises(ConfigError, match="Set --calculate-per-token-loss"):
        slime_check_config(config("dapo"))
    slime_check_config(config("dapo", calculate_per_token_loss=True))


def test_dapos_buffer_must_fit_into_a_response() -> None:
    with pytest.raises(ConfigError, match=r"--estimator\.overlong-buffer 65 is longer .*len 64"):
        slime_check_config(config("dapo", calculate_per_token_loss=True, options={"overlong_buffer": "65"}))
    slime_check_config(config("dapo", calculate_per_token_loss=True, options={"overlong_buffer": 64}))


def test_dual_clip_of_cispo_is_refused() -> None:
    with pytest.raises(ConfigError, match="--eps-clip-c 3 has no effect"):
        slime_check_config(config("cispo", eps_clip_c=3.0))
    slime_check_config(config("grpo", eps_clip_c=3.0))


def test_all_problems_are_reported_at_once() -> None:
    wrong = {"overlong_buffer": 65}
    with pytest.raises(ConfigError, match=r"--calculate-per-token-loss.*overlong-buffer 65"):
        slime_check_config(config("dapo", options=wrong))


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "ppo", "rloo", "reinforce_plus_plus"])
def test_most_estimators_need_no_other_flags(name: str) -> None:
    slime_check_config(config(name))
