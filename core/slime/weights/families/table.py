"""The families slime knows, by `model_type`, and the choice of one."""

from __future__ import annotations

from slime.errors import ConfigError, did_you_mean
from slime.weights.families import llama, qwen3
from slime.weights.families.base import Family, HFConfig

FAMILIES: dict[str, Family] = {family.model_type: family for family in (llama.FAMILY, qwen3.FAMILY)}


def family_of(config: HFConfig) -> Family:
    """The family of a `config.json`.

    Raises `ConfigError` for an unknown `model_type`, for an entry of `architectures` that is not the family's
    causal language model, and for a quantised checkpoint.
    """
    model_type = config.get("model_type")
    known = ", ".join(sorted(FAMILIES))
    if not isinstance(model_type, str):
        raise ConfigError(f"config.json: model_type is {model_type!r}; expected one of: {known}.")
    family = FAMILIES.get(model_type)
    if family is None:
        raise ConfigError(
            f"config.json: model_type {model_type!r} is not supported; known: {known}."
            f"{did_you_mean(model_type, FAMILIES)}"
        )
    architectures = config.get("architectures") or [family.causal_lm]
    if family.causal_lm not in architectures:
        raise ConfigError(
            f"config.json: architectures is {architectures!r}; for model_type {model_type!r} slime trains "
            f"{family.causal_lm}."
        )
    if config.get("quantization_config"):
        raise ConfigError(
            "config.json: quantization_config is set; slime trains full-precision weights. "
            "Use the unquantised checkpoint."
        )
    return family
