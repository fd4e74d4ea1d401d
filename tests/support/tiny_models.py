"""Tiny Hugging Face model folders, made by transformers with random weights, for tests against real engines.

Weights are larger than a trained model's initial ones and norms are randomized, so that a tensor put in the
wrong place changes the outputs by far more than rounding does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.testing import make_tokenizer

VOCAB_SIZE = 128

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.06,
}
_LLAMA_31 = {
    "max_position_embeddings": 16384,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

FAMILIES = ("llama", "llama31", "qwen3")


def make_tiny_model(folder: Path, family: str, *, seed: int, tied: bool = False, **overrides: Any) -> Path:
    """Write a model folder (float32, 3 layers, hidden 64, vocabulary 128) with a tokenizer; returns it.

    family: one of `FAMILIES`. `overrides` go into the transformers configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    settings = {**_COMMON, "tie_word_embeddings": tied}
    config = {
        "llama": lambda: LlamaConfig(**settings | overrides),
        "llama31": lambda: LlamaConfig(**settings | _LLAMA_31 | overrides),
        "qwen3": lambda: Qwen3Config(**settings | {"head_dim": 32} | overrides),
    }[family]()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


def write_tiny_tokenizer(folder: Path) -> None:
    """A tokenizer of single printable characters with a chat template; every id is below `VOCAB_SIZE`."""
    make_tokenizer().save_pretrained(folder)
