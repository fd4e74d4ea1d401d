"""The model families slime can train.

A family is a function from `config.json` to an `Architecture`. To add one, write the function (`dense` shows two) and
give it a row in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slime.errors import ConfigError, did_you_mean
from slime.weights.families.dense import llama, qwen3
from slime.weights.families.hf_config import HFConfig
from slime.weights.mapping import Architecture


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model_type: `model_type` in `config.json`.
        causal_lm: The entry of `architectures` that it implements.
        describe: Turns the configuration into an architecture. Raises `ConfigError` for settings that would change the
            computation and that slime does not support.
    """

    model_type: str
    causal_lm: str
    describe: Callable[[HFConfig], Architecture]


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", llama),
        Family("qwen3", "Qwen3ForCausalLM", qwen3),
    )
}


def architecture(hf_config: HFConfig) -> Architecture:
    """The architecture described by a `config.json`.

    Raises:
        ConfigError: For an unknown family, a model that is not the family's causal language model, a quantised
            checkpoint, and any setting that would change the computation and that slime does not support.
    """
    model_type = hf_config.get("model_type")
    known = ", ".join(sorted(FAMILIES))
    if not isinstance(model_type, str):
        raise ConfigError(f"config.json: model_type is {model_type!r}; expected one of: {known}.")
    family = FAMILIES.get(model_type)
    if family is None:
        raise ConfigError(
            f"config.json: model_type {model_type!r} is not supported; known: {known}."
            f"{did_you_mean(model_type, FAMILIES)}"
        )
    architectures = hf_config.get("architectures") or [family.causal_lm]
    if not isinstance(architectures, list) or family.causal_lm not in architectures:
        raise ConfigError(
            f"config.json: architectures is {architectures!r}; for model_type {model_type!r} slime trains "
            f"{family.causal_lm}."
        )
    if hf_config.get("quantization_config"):
        raise ConfigError(
            "config.json: quantization_config is set; slime trains full-precision weights. "
            "Use the unquantised checkpoint."
        )
    return family.describe(hf_config)
