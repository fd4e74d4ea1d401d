"""What published `config.json` files have beside the numbers of a model is accepted, and means nothing."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from tests.support.families import architecture
from tests.support.tiny_models import FAMILIES, published

from slime.weights.hf_settings import fields_of

#: what each family's published files have beside the numbers that its small model has
PUBLISHED: dict[str, dict[str, Any]] = {
    # Vicuna, and conversions of Llama 2
    "llama": {
        "_name_or_path": "vicuna-7b",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_sequence_length": 2048,
        "mlp_bias": False,
        "pad_token_id": 0,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "torch_dtype": "float16",
        "transformers_version": "4.31.0",
        "use_cache": True,
    },
    "llama31": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [1, 2, 3],
        "mlp_bias": False,
        "pretraining_tp": 1,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3",
        "use_cache": True,
    },
    "qwen2": {
        "attention_dropout": 0.0,
        "bos_token_id": 3,
        "eos_token_id": 4,
        "max_window_layers": 28,
        "sliding_window": 32768,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "qwen3": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 3,
        "max_window_layers": 28,
        "rope_scaling": None,
        "sliding_window": None,
        "use_cache": True,
        "use_sliding_window": False,
    },
    "qwen3_moe": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_cache": True,
        "use_sliding_window": False,
    },
    "glm": {
        "attention_dropout": 0.0,
        "eos_token_id": [1, 2, 3],
        "pad_token_id": 1,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    },
    "glm4": {
        "attention_dropout": 0.0,
        "eos_token_id": [1, 2, 3],
        "pad_token_id": 1,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    },
    "glm4_moe": {
        "attention_dropout": 0.0,
        "pad_token_id": 1,
        "eos_token_id": [1, 2, 3],
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    },
    "glm4_moe_lite": {
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "pad_token_id": 1,
        "eos_token_id": [1, 2, 3],
        "topk_method": "noaux_tc",
        "rope_scaling": None,
    },
    "deepseek_v3": {
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "pretraining_tp": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    },
    "moonlight": {
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
        "use_cache": True,
    },
    "kimi_k2": {
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
        "use_cache": True,
    },
}
PUBLISHED["glm4_moe_air"] = PUBLISHED["glm4_moe"]

#: what other libraries, older releases and other models leave in a file
LEFT_OVER = (
    {"_attn_implementation": "eager", "_attn_implementation_autoset": True, "attn_implementation": "sdpa"},
    {"add_cross_attention": True, "is_decoder": True, "use_return_dict": True, "return_dict": True},
    {"max_seq_len": 2048, "max_sequence_length": 2048, "model_max_length": 2048, "seq_length": 2048},
    {"name": "mine", "task": "chat", "type": "text", "version": "1.2", "description": "tuned"},
    {"attention_dropout": 0.1, "dropout": 0.1, "hidden_dropout": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    {"classifier_dropout": 0.1, "id2label": {"0": "a"}, "label2id": {"a": 0}, "problem_type": "regression"},
    {"unsloth_version": "2025.1", "unsloth_fixed": True, "comment": "tuned"},
    {"use_cache": False, "temperature": 0.6, "bos_token_id": 5, "torch_dtype": "bfloat16"},
    {"num_mtp_layers": 0, "final_logit_softcapping": None, "mlp_bias": False},
    # read for other models only
    {"clip_qkv": 8.0, "embedding_multiplier": 12.0, "logit_scale": 0.5, "query_pre_attn_scalar": 256},
)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_published_files_have_is_accepted(family: str) -> None:
    assert architecture(published(family) | PUBLISHED[family]) == architecture(published(family))


@pytest.mark.slow
@pytest.mark.parametrize("change", LEFT_OVER, ids=lambda change: next(iter(change)))
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "glm4", "glm", "moonlight", "kimi_k2"])
def test_settings_without_effect_are_accepted(family: str, change: dict[str, Any]) -> None:
    assert architecture(published(family) | change) == architecture(published(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_every_configuration_of_transformers_has_is_accepted(family: str) -> None:
    """As a file that was written by hand from `config.to_dict()`, with nothing left out."""
    base = published(family)
    whole = transformers.PretrainedConfig().to_dict() | base
    assert architecture(whole) == architecture(base)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_only_a_stated_number_of_layers_for_multi_token_prediction_counts(family: str) -> None:
    """Not the default of transformers, which is one: a folder without them would be said to have one."""
    stated = published(family) | {"num_nextn_predict_layers": 1}
    silent = {key: value for key, value in stated.items() if key != "num_nextn_predict_layers"}
    assert architecture(stated).predicting is not None
    found = architecture(silent)
    assert found.predicting is None and found.carried == ()
    if "num_mtp_layers" in fields_of(stated["architectures"][0]).names:
        assert architecture(silent | {"num_mtp_layers": 1}) == architecture(stated)
