"""A configuration is the same after it was written as TOML and read again."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.config.conftest import GOOD

from slime.config import PluginOptions, RunConfig, config_from_toml, load_config, resolve
from slime.config.eval_options import EvalOptions, EvalSetOptions
from slime.config.options import (
    AlgorithmOptions,
    ComponentChoice,
    DataOptions,
    RewardOptions,
    RolloutOptions,
    RunOptions,
)
from slime.config.weight_options import CheckpointOptions
from slime.errors import ConfigError
from slime.errors.redaction import is_secret, without_credentials

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=20)
# Hypothesis also tries texts that it finds in the code, such as names of secrets, which are not written.
texts = texts.filter(lambda text: not is_secret(text) and without_credentials(text) == text)
keys = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(lambda key: not is_secret(key))
numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
positive = st.integers(1, 10**6)
options = st.dictionaries(
    keys.filter(lambda key: key not in ("name", "reward", "advantage_estimator")), values, max_size=3
)

eval_sets = st.builds(
    EvalSetOptions,
    name=texts,
    path=texts,
    temperature=st.none() | st.floats(0, 2),
    stop=st.none() | st.lists(texts, max_size=2),
    label_key=st.none() | texts,
    reward=st.none() | st.builds(ComponentChoice, name=texts, options=options),
)

configs = st.builds(
    RunConfig,
    run=st.builds(RunOptions, output_dir=texts, run_name=st.none() | texts, seed=st.integers(0, 2**31 - 1)),
    data=st.builds(
        DataOptions,
        prompt_data=st.none() | texts | st.lists(texts, max_size=3),
        label_key=st.none() | texts,
        apply_chat_template=st.booleans(),
    ),
    rollout=st.builds(
        RolloutOptions,
        num_rollout=st.none() | positive,
        rollout_temperature=st.floats(1e-6, 1e6),
        rollout_stop=st.lists(texts, max_size=3),
        rollout_stop_token_ids=st.lists(positive, max_size=3),
        async_mode=st.booleans(),
        generator=st.none() | texts,
    ),
    algorithm=st.builds(AlgorithmOptions, advantage_estimator=st.none() | texts, kl_coef=st.floats(0, 1)),
    reward=st.builds(RewardOptions, reward=st.none() | texts),
    evaluation=st.builds(
        EvalOptions,
        eval_prompt_data=st.lists(st.tuples(texts, texts), max_size=3),
        sets=st.lists(eval_sets, max_size=2),
    ),
    checkpoint=st.builds(CheckpointOptions, save=st.none() | texts, save_interval=st.none() | positive),
    plugins=st.builds(PluginOptions, allow=st.none() | st.lists(texts, max_size=2), strict=st.booleans()),
    megatron=st.fixed_dictionaries(
        {},
        optional={
            "num_layers": positive,
            "lr": st.floats(0, 1, exclude_min=True),
            "bf16": st.booleans(),
            "apply_rope_fusion": st.booleans(),
            "barrier_with_L1_time": st.booleans(),
            "recompute_modules": st.lists(texts, min_size=1, max_size=3),
            "moe_layer_freq": st.lists(st.integers(0, 1), min_size=1, max_size=4),
            "normalization": st.sampled_from(["LayerNorm", "RMSNorm"]),
        },
    ),
    sglang=st.fixed_dictionaries(
        {},
        optional={
            "mem_fraction_static": st.floats(0, 1, exclude_min=True, exclude_max=True),
            "log_level": texts,
            "disable_radix_cache": st.booleans(),
            "cuda_graph_bs_decode": st.lists(positive, min_size=1, max_size=3),
            "fp8_gemm_runner_backend": texts,
            "preferred_sampling_params": st.dictionaries(texts, numbers, max_size=2),
        },
    ),
    component_options=st.dictionaries(
        st.sampled_from(["estimator", "reward", "generator", "datasource"]),
        options.filter(bool),
        max_size=2,
    ),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(configs)
def test_a_configuration_survives_a_round_trip(config: RunConfig) -> None:
    assert config_from_toml(config.to_toml()) == config


def test_a_value_that_toml_cannot_represent_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[megatron\] cannot be written to a run file: .*NoneType"):
        RunConfig(megatron={"x": None}).to_toml()


def test_a_resolved_configuration_survives_a_round_trip_and_stays_resolved() -> None:
    config = load_config([*GOOD, "--sglang-tp-size", "2", "--eps-clip-high", "0.3", "--reward.a", "5"])
    again = config_from_toml(config.to_toml())
    assert again == config
    assert resolve(again) == config


def test_a_configuration_survives_pickling() -> None:
    config = load_config([*GOOD, "--num-layers", "3", "--sglang-log-level", "info"])
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_configuration_is_frozen() -> None:
    config = RunConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.megatron = {}
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 3
