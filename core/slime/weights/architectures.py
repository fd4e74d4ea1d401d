"""From a Hugging Face `config.json` to the keywords that build the same model in Megatron-core."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.errors import ConfigError
from slime.weights.families.base import HFConfig
from slime.weights.families.table import family_of


@dataclass(frozen=True)
class Architecture:
    """What a model is, in Megatron-core's terms.

    family: `model_type` of the configuration.
    transformer: keywords of `TransformerConfig`.  All JSON-able; `activation_func` is a name ("silu").
    gpt: keywords of `GPTModel`: vocab_size (unpadded), max_sequence_length, position_embedding_type,
        rotary_base, rotary_percent, rope_scaling, rope_scaling_factor, share_embeddings_and_output_weights.
    """

    family: str
    transformer: dict[str, Any]
    gpt: dict[str, Any]


def architecture(hf_config: HFConfig) -> Architecture:
    """The architecture a `config.json` describes.

    Raises `ConfigError` for an unknown family and for every setting that would change the computation and
    that slime does not perform.
    """
    family = family_of(hf_config)
    return Architecture(family.model_type, family.transformer(hf_config), family.gpt(hf_config))


def read_hf_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder.  Raises `ConfigError` where it is missing or no JSON object."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; expected a Hugging Face model folder (config.json, *.safetensors)."
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds {type(config).__name__}; expected a JSON object.")
    return config
