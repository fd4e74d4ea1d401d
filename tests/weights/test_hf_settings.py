"""One reading of `config.json` for the trainer and the engines: what transformers makes of it, or a refusal."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.support.families import architecture
from tests.support.tiny_models import FAMILIES, as_transformers_writes, published

from slime.errors import ConfigError
from slime.plugin.architecture import Architecture
from slime.weights.hf_config import read_hf_config
from slime.weights.hf_settings import fields_of
from slime_families import slime_register_families

#: a number of a model cannot follow from these alone
SIZES = {
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
}
CLASSES = sorted({spec.causal_lm for spec in slime_register_families()})


def config_class(causal_lm: str) -> Any:
    return getattr(transformers, causal_lm).config_class


@pytest.mark.parametrize("causal_lm", CLASSES)
def test_the_source_of_a_class_says_what_the_class_does(causal_lm: str) -> None:
    fields, made = fields_of(causal_lm), config_class(causal_lm)
    assert fields.names == made.attribute_map
    declared = made.__dataclass_fields__
    for key, value in fields.defaults.items():
        if key in declared and key not in fields.names:
            assert declared[key].default == value, key
    assert not SIZES & fields.defaults.keys()
    assert {"rms_norm_eps", "hidden_act", "num_key_value_heads", "tie_word_embeddings"} <= fields.defaults.keys()


def test_a_class_that_transformers_does_not_have_has_no_fields() -> None:
    assert fields_of("PebbleForCausalLM").defaults == {}


def numbers_of(found: Architecture) -> dict[str, Any]:
    """What slime builds."""
    latent = found.transformer.get("multi_latent_attention", False)
    return {
        "rms_norm_eps": found.transformer["layernorm_epsilon"],
        "rope_theta": found.gpt["rotary_base"],
        "tie_word_embeddings": found.gpt["share_embeddings_and_output_weights"],
        "num_key_value_heads": found.transformer["num_query_groups"],
        "head_dim": None if latent else found.transformer["kv_channels"],
        "partial_rotary_factor": None if latent else found.gpt["rotary_percent"],
        "bias": found.transformer["add_qkv_bias"],
        "groups": found.transformer.get("moe_router_num_groups") or 1,
        "factor": found.transformer.get("moe_router_topk_scaling_factor"),
        "experts": found.transformer.get("num_moe_experts"),
    }


def numbers_by_transformers(causal_lm: str, config: dict[str, Any]) -> dict[str, Any]:
    """The same of transformers' own object. Raises whatever transformers raises."""
    # a copy: transformers writes into the tables that it is given, such as rope_scaling
    settings = copy.deepcopy({key: value for key, value in config.items() if key != "model_type"})
    made = config_class(causal_lm)(**settings)
    latent = hasattr(made, "kv_lora_rank")
    head_dim = getattr(made, "head_dim", made.hidden_size // made.num_attention_heads)
    return {
        "rms_norm_eps": made.rms_norm_eps,
        "rope_theta": made.rope_parameters["rope_theta"],
        "tie_word_embeddings": made.tie_word_embeddings,
        "num_key_value_heads": made.num_key_value_heads,
        "head_dim": None if latent else head_dim,
        "partial_rotary_factor": None if latent else made.rope_parameters.get("partial_rotary_factor", 1.0),
        # its model has them without a setting
        "bias": causal_lm == "Qwen2ForCausalLM" or getattr(made, "attention_bias", False),
        "groups": getattr(made, "n_group", 1),
        "factor": getattr(made, "routed_scaling_factor", None),
        "experts": getattr(made, "num_experts", getattr(made, "n_routed_experts", None)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_setting_that_is_missing_or_null_means_what_transformers_says_or_is_refused(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "transformers")
    base = published(family)
    causal_lm, taken = base["architectures"][0], 0
    for key in base.keys() - {"model_type", "architectures"}:
        for changed in ({name: value for name, value in base.items() if name != key}, base | {key: None}):
            try:
                found = architecture(changed)
            except ConfigError:
                continue
            taken += 1
            assert numbers_of(found) == numbers_by_transformers(causal_lm, changed), (key, changed.get(key, "missing"))
    assert taken > 10


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("glm4_moe", "rms_norm_eps"),
        ("glm4_moe_lite", "rms_norm_eps"),
        ("glm", "attention_bias"),
        ("glm4", "partial_rotary_factor"),
        ("deepseek_v3", "n_group"),
        ("qwen3_moe", "head_dim"),
        ("llama", "head_dim"),
        ("llama", "num_key_value_heads"),
    ],
)
def test_a_missing_setting_that_transformers_fills_is_not_refused(family: str, key: str) -> None:
    base = published(family) | ({"n_routed_experts": 16, "topk_group": 4} if key == "n_group" else {})
    base.pop(key, None)
    assert numbers_of(architecture(base)) == numbers_by_transformers(base["architectures"][0], base)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "change"),
    [
        # what a family does not compute
        ("llama", {"sliding_window": 4096}),
        ("llama", {"original_max_position_embeddings": 4096}),
        ("qwen2", {"final_logit_softcapping": 30.0}),
        ("qwen2", {"attn_logit_softcapping": 50.0}),
        ("qwen3", {"dual_chunk_attention_config": {"chunk_size": 1024}}),
        ("qwen3_moe", {"qkv_bias": True}),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("glm4_moe", {"norm_topk_prob": False}),
        ("glm4_moe", {"num_hash_layers": 1}),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "dense", "sparse"]}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"num_key_value_heads": 2}),
        ("deepseek_v3", {"head_dim": 64}),
        ("deepseek_v3", {"qk_head_dim": 64}),
        ("deepseek_v3", {"swiglu_limit": 7.0}),
        ("kimi_k2", {"topk_method": "greedy"}),
        # what transformers itself refuses, at the start or when it builds the model
        ("deepseek_v3", {"n_group": None}),
        ("deepseek_v3", {"norm_topk_prob": None}),
        ("qwen3", {"head_dim": None}),
        ("qwen3", {"layer_types": ["full_attention"]}),
        ("llama", {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 16}),
        ("glm4", {"partial_rotary_factor": None}),
        # one setting under two names
        ("qwen3_moe", {"num_local_experts": 4}),
        ("glm4_moe", {"num_mtp_layers": 2}),
    ],
)
def test_a_setting_that_changes_numbers_is_refused_by_name(family: str, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        architecture(published(family) | change)


LLAMA3 = {"rope_type": "llama3", **{k: v for k, v in published("llama31")["rope_scaling"].items() if k != "rope_type"}}
YARN = published("deepseek_v3")["rope_scaling"]
PLAIN = {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("family", "change", "mentions"),
    [
        # transformers would take rope_scaling, and forget the other with its rope_theta
        ("llama31", {"rope_parameters": PLAIN}, "State everything in rope_parameters"),
        ("qwen3", {"rope_parameters": PLAIN, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "remove rope_sc"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "factor": 8.0}}, "factor"),
        # what one of them does not compute
        ("deepseek_v3", {"rope_scaling": {**YARN, "attention_factor": 1.5}}, "attention_factor"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "truncate": False}}, "truncate"),
        ("llama31", {"rope_scaling": {**LLAMA3, "attention_factor": 2.0}}, "attention_factor"),
        ("llama", {"rope_scaling": {"factor": 4.0}}, "factor"),
        ("qwen3", {"rope_parameters": {"full_attention": PLAIN}}, "one table for all layers"),
        # without them, transformers computes something else or fails
        ("deepseek_v3", {"rope_scaling": {k: v for k, v in YARN.items() if k != "factor"}}, "factor is missing"),
        ("llama31", {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "factor"}}, "factor is missing"),
        ("llama31", {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}}, "low_freq_factor"),
        ("llama", {"rope_theta": None}, "rope_theta"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_theta"),
    ],
)
def test_positions_on_which_trainer_and_engine_would_differ_are_refused(
    family: str, change: dict[str, Any], mentions: str
) -> None:
    with pytest.raises(ConfigError, match=mentions):
        architecture(published(family) | change)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama31", {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}),
        ("deepseek_v3", {"rope_scaling": {**YARN, "truncate": True}}),
        ("deepseek_v3", {"rope_scaling": None, "rope_parameters": {**YARN, "rope_theta": 10000.0}}),
        ("llama", {"rope_scaling": {}, "rope_parameters": {"rope_theta": 10000.0}}),
    ],
)
def test_two_ways_to_say_the_same_are_accepted(family: str, change: dict[str, Any]) -> None:
    assert architecture(published(family) | change) == architecture(published(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_read_as_what_it_was_made_from(family: str, tmp_path: Path) -> None:
    base = published(family)
    (tmp_path / "config.json").write_text(json.dumps(base))
    written = read_hf_config(as_transformers_writes(tmp_path))
    assert "rope_parameters" in written and "rope_theta" not in written
    found, expected = architecture(written), architecture(base)
    assert (found.transformer, found.gpt, found.rules) == (expected.transformer, expected.gpt, expected.rules)
    added = found.missing_from(written)
    assert added["architectures"] == base["architectures"]
    if base["model_type"] in ("deepseek_v3", "kimi_k2"):
        assert added.keys() == {"architectures", "moe_layer_freq", "scoring_func", "topk_method"}
    assert architecture(written | added) == found
    assert found.missing_from(written | added) == {}
