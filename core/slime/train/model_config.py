"""One architecture from two sources: the Hugging Face `config.json` and the Megatron flags that the user stated.

Stated flags must agree with the model folder; without a folder they describe the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.errors import ConfigError
from slime.plugin.architecture import Architecture
from slime.weights import Models
from slime.weights.mapping import differences
from slime.weights.stated_model import contradictions, flag_of, stated_model

_GPT_DEFAULTS: dict[str, Any] = {
    "position_embedding_type": "rope",
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "share_embeddings_and_output_weights": False,
    "max_sequence_length": 4096,
}
#: a model cannot be built without these
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class ModelShape:
    """Keywords of `TransformerConfig` (with the activation by name) and of `GPTModel`."""

    transformer: dict[str, Any]
    gpt: dict[str, Any]


def merge_architecture(hf: ModelShape | None, megatron: Mapping[str, Any], *, post_norms: bool = False) -> ModelShape:
    """Merge what the folder describes, or None without a folder, with the flags in `megatron`.

    Args:
        hf: What the folder describes.
        megatron: The flags.
        post_norms: See `Architecture`.

    Raises:
        ConfigError: Flag and folder state different values, or neither states a value that is needed.
    """
    transformer, gpt = stated_model(megatron)
    if hf is None:
        known = {**transformer, **gpt}
        missing = [name for name in _REQUIRED if name not in known]
        if missing:
            raise ConfigError(
                "no Hugging Face folder describes the model, and these flags are missing: "
                + ", ".join(flag_of(name) for name in missing)
            )
        return ModelShape(transformer, {**_GPT_DEFAULTS, **gpt})
    # The command line has compared --mtp-num-layers, for which the model that is built makes no difference.
    compared = {name: value for name, value in megatron.items() if name != "mtp_num_layers"}
    wrong = contradictions(compared, hf.transformer, hf.gpt, post_norms=post_norms, source="--hf-checkpoint")
    if (first := next(wrong, None)) is not None:
        raise ConfigError(f"{first}.")
    return ModelShape({**hf.transformer, **transformer}, {**_GPT_DEFAULTS, **hf.gpt, **gpt})


def read_same_model(
    folder: Path, models: Models, ours: Architecture | None, option: str, *, output_layer: bool = True
) -> Architecture:
    """The model in a further folder of the run (the reference's or the critic's), after comparing it with the policy.

    Args:
        folder: The folder.
        models: Reads the folder.
        ours: The model of `--hf-checkpoint`; None skips the comparison.
        option: The flag that names `folder`, for messages.
        output_layer: Whether the output layers must agree too; a critic has none over the vocabulary.

    Raises:
        ConfigError: The architectures differ; the message lists every difference.
    """
    found = models.read(folder)
    different = [] if ours is None else differences(ours, found, output_layer=output_layer)
    if different:
        raise ConfigError(f"{option} {folder} has another architecture than --hf-checkpoint: {', '.join(different)}.")
    return found
