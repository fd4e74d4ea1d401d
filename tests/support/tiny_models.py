"""Tiny Hugging Face model folders, made by transformers with random weights, for tests against real engines.

Every family has the features of its real models, in a smaller size: its `config.json` has the keys of a published one,
and the tensors have the published names. Weights are larger than a trained model's initial ones, and norms, biases and
the choice of experts are randomized, so that a tensor put in the wrong place changes the outputs by far more than
rounding does.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.testing import make_tokenizer
from slime.testing.random_models import transformers_model, write_random_model

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from slime.rollout.train_batch import TrainBatch

__all__ = [
    "FAMILIES",
    "MOE_FAMILIES",
    "VOCAB_SIZE",
    "as_transformers_writes",
    "make_tiny_model",
    "published",
    "transformers_log_probs",
    "transformers_model",
]

VOCAB_SIZE = 128

_COMMON = {
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.06,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}
#: the fields that configurations of mixtures of experts share, except Qwen's
_EXPERTS = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}
_LATENT_ATTENTION = {
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "kv_lora_rank": 32,
    "moe_layer_freq": 1,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_method": "noaux_tc",
    "v_head_dim": 32,
}
_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
    "type": "yarn",
}
_QWEN = {"max_window_layers": 3, "sliding_window": None, "use_sliding_window": False}

#: family -> the fields of its `config.json` in which it differs from `_COMMON`
_PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
        "model_type": "llama",
        "rope_scaling": None,
    },
    "llama31": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "max_position_embeddings": 16384,
        "mlp_bias": False,
        "model_type": "llama",
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1000000.0, **_QWEN},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 32,
        "model_type": "qwen3",
        "rope_scaling": None,
        **_QWEN,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 32,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        **_QWEN,
    },
    "glm": {
        "architectures": ["GlmForCausalLM"],
        "attention_bias": True,
        "head_dim": 16,
        "model_type": "glm",
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
    },
    "glm4": {
        "architectures": ["Glm4ForCausalLM"],
        "attention_bias": True,
        "head_dim": 16,
        "model_type": "glm4",
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
    },
    "glm4_moe": {
        **_EXPERTS,
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "head_dim": 32,
        "model_type": "glm4_moe",
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "use_qk_norm": True,
    },
    "glm4_moe_lite": {
        **_EXPERTS,
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "attention_bias": False,
        "kv_lora_rank": 32,
        "model_type": "glm4_moe_lite",
        "num_key_value_heads": 4,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.8,
        "topk_method": "noaux_tc",
        "v_head_dim": 64,
    },
    "deepseek_v3": {
        **_EXPERTS,
        **_LATENT_ATTENTION,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_group": 2,
        "rope_scaling": _YARN,
    },
    "moonlight": {
        **_EXPERTS,
        **_LATENT_ATTENTION,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_shared_experts": 2,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-05,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
    },
    "kimi_k2": {
        **_EXPERTS,
        **_LATENT_ATTENTION,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "num_nextn_predict_layers": 0,
        "rope_scaling": {**_YARN, "beta_fast": 1.0, "beta_slow": 1.0},
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
    },
}
# GLM-4.5-Air differs from GLM-4.5 in more than its size.
_PUBLISHED["glm4_moe_air"] = _PUBLISHED["glm4_moe"] | {"routed_scaling_factor": 1.0, "use_qk_norm": False}

FAMILIES = tuple(sorted(_PUBLISHED))
#: families that are mixtures of experts
MOE_FAMILIES = tuple(name for name in FAMILIES if {"num_experts", "n_routed_experts"} & _PUBLISHED[name].keys())


def published(family: str) -> dict[str, Any]:
    """The `config.json` of a family, as published but smaller.

    A copy: transformers writes into the tables of a config that it is given, such as rope_scaling.
    """
    return copy.deepcopy(_COMMON | _PUBLISHED[family])


def make_tiny_model(folder: Path, family: str, *, seed: int, tied: bool = False, **overrides: Any) -> Path:
    """Write a model folder (float32, 3 layers, hidden 64, vocabulary 128) with a tokenizer; returns it.

    A family with layers for multi-token prediction (`num_nextn_predict_layers`) has one, after the layers of the model.

    family: one of `FAMILIES`. `overrides` replace fields of its `config.json`.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = published(family) | {"tie_word_embeddings": tied, "torch_dtype": "float32"} | overrides
    layers, predicting = config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)
    whole = config | {"num_hidden_layers": layers + predicting, "num_nextn_predict_layers": 0}
    write_random_model(folder, whole, seed=seed)
    if predicting:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for layer in range(layers, layers + predicting):
                tensors |= _prediction_tensors(f"model.layers.{layer}", config, tensors)
        save_file(tensors, path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_tiny_tokenizer(folder)
    return folder


def as_transformers_writes(folder: Path) -> Path:
    """Replace `config.json` by what the installed transformers writes for the same model; returns the folder.

    Settings that published files have for other libraries are not in it, and `architectures` is null.
    """
    import transformers

    path = folder / "config.json"
    config = json.loads(path.read_text())
    made = getattr(transformers, config["architectures"][0]).config_class
    foreign = {
        "first_k_dense_replace",
        "moe_layer_freq",
        "scoring_func",
        "topk_method",
    } - made.__dataclass_fields__.keys()
    own = {key: value for key, value in config.items() if key not in foreign | {"model_type"}}
    written = made(**own).to_json_string(use_diff=True)
    path.write_text(json.dumps(json.loads(written) | {"model_type": config["model_type"], "architectures": None}))
    return folder


def transformers_log_probs(
    folder: Path, batch: TrainBatch, *, temperature: float, dtype: str = "float32", device: str = "cpu"
) -> list[np.ndarray[Any, Any]]:
    """Log-probs of the response tokens by transformers, sample by sample: N x [T_i] float32."""
    import torch

    model = transformers_model(folder).to(device)
    for parameter in model.parameters():  # not the buffers: rotary angles stay in float32
        parameter.data = parameter.data.to(getattr(torch, dtype))
    result = []
    for tokens, length in zip(batch.tokens, batch.response_lengths, strict=True):
        ids = torch.from_numpy(tokens).long().to(device)
        with torch.no_grad():
            scores = (model(ids[None]).logits[0, :-1].float() / temperature).log_softmax(-1)
        result.append(scores.gather(-1, ids[1:, None])[-int(length) :, 0].cpu().numpy())
    return result


def _prediction_tensors(layer: str, config: dict[str, Any], model: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a layer for multi-token prediction has besides the tensors of a decoder layer.

    Published files repeat the embedding and the output layer in it.
    """
    import torch

    hidden = config["hidden_size"]
    return {
        f"{layer}.eh_proj.weight": torch.randn(hidden, 2 * hidden) * config["initializer_range"],
        f"{layer}.embed_tokens.weight": model["model.embed_tokens.weight"].clone(),
        f"{layer}.enorm.weight": 1 + torch.randn(hidden) * 0.1,
        f"{layer}.hnorm.weight": 1 + torch.randn(hidden) * 0.1,
        f"{layer}.shared_head.head.weight": model["lm_head.weight"].clone(),
        f"{layer}.shared_head.norm.weight": 1 + torch.randn(hidden) * 0.1,
    }


def write_tiny_tokenizer(folder: Path) -> None:
    """A tokenizer of single printable characters with a chat template; every id is below `VOCAB_SIZE`."""
    make_tokenizer().save_pretrained(folder)
