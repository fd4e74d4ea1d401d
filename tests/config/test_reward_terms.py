"""Several rewards in a run file."""

from __future__ import annotations

import pytest

from slime.config import config_from_toml, read_config
from slime.config.options import RewardTerm
from slime.errors import ConfigError
from slime.registry.resolve import Use, components_used

TERMS = """
[reward]
reward_workers = 3
[[reward.terms]]
name = "math/boxed"
weight = 0.8
timeout-s = 5
[[reward.terms]]
name = "brevity"
options = {length = 7}
"""


def test_other_keys_of_a_term_are_options_of_its_component() -> None:
    config = config_from_toml(TERMS)
    assert config.reward.terms == [
        RewardTerm(name="math/boxed", weight=0.8, options={"timeout_s": 5}),
        RewardTerm(name="brevity", options={"length": 7}),
    ]
    assert config.reward.reward_workers == 3
    assert config.component_options == {}


def test_each_term_is_a_slot_in_the_order_of_the_file() -> None:
    rewards = [use for use in components_used(config_from_toml(TERMS)) if use.kind == "reward"]
    assert rewards == [
        Use("reward[0]", "reward", "math/boxed", {"timeout_s": 5}, 0.8),
        Use("reward[1]", "reward", "brevity", {"length": 7}, 1.0),
    ]


def test_terms_survive_a_round_trip() -> None:
    config = config_from_toml(TERMS)
    assert config_from_toml(config.to_toml()) == config


def test_flags_cannot_set_terms() -> None:
    with pytest.raises(ConfigError, match="unknown flag --terms"):
        read_config(["--terms", "x"])


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ("[{weight = 1.0}]", r"\[reward\] terms\[0\]\.name: is missing from .*weight"),
        ('[{name = "a"}, {name = "a", weight = "much"}]', r"terms\[1\]\.weight: got 'much', expected a number"),
        ('"boxed"', r"\[reward\] terms: got 'boxed', expected a list"),
    ],
)
def test_a_wrong_term_is_reported(terms: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_toml(f"[reward]\nterms = {terms}\n")
