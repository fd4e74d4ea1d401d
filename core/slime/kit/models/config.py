"""Reading `config.json` strictly.

A setting that changes the computation and that slime does not support is refused: otherwise the trainer would silently
compute something else than the engines. A missing or null key counts as absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slime.errors import ConfigError

HFConfig = Mapping[str, Any]


def positive_int(config: HFConfig, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
    """An integer from 1 to `most`. A missing or null key gives the default; without a default it is refused."""
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise ConfigError(f"config.json: {key} is missing; expected a positive integer.")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"config.json: {key} is {value!r}; expected a positive integer, at most {most}.")
    return value


def positive_float(config: HFConfig, key: str, default: float | None = None) -> float:
    """A number above 0. A missing or null key gives the default; without a default it is refused."""
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise ConfigError(f"config.json: {key} is missing; expected a number above 0.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"config.json: {key} is {value!r}; expected a number above 0.")
    return float(value)


def require(config: HFConfig, key: str, allowed: tuple[object, ...], why: str) -> None:
    """Refuse a value that would change the computation. A missing key counts as None."""
    value = config.get(key)
    if value not in allowed:
        wanted = " or ".join(dict.fromkeys(repr(item) for item in allowed if item is not None))
        raise ConfigError(
            f"config.json: {key} is {value!r}, which slime does not compute for model_type "
            f"{config.get('model_type')!r} ({why}); supported: {wanted}."
        )


def at_least_zero(config: HFConfig, key: str, default: int) -> int:
    """An integer of at least 0. A missing or null key gives the default."""
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"config.json: {key} is {value!r}; expected an integer of at least 0.")
    return value


def boolean(config: HFConfig, key: str, default: bool) -> bool:
    """True or false. A missing or null key gives the default."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {key} is {value!r}; expected true or false.")
    return value


def full_attention(config: HFConfig) -> None:
    """Refuse attention over a window, in all layers or in some."""
    require(config, "use_sliding_window", (None, False), "attention over a window")
    kinds = config.get("layer_types") or ()
    other = sorted({str(kind) for kind in (kinds if isinstance(kinds, list | tuple) else [kinds])} - {"full_attention"})
    if other:
        raise ConfigError(
            f"config.json: layer_types has {other}; slime computes only 'full_attention' for"
            f" {config.get('model_type')}."
        )


def rope_table(config: HFConfig) -> dict[str, Any]:
    """The settings of the rotary embedding, from either spelling of `config.json`.

    Recent files have `rope_parameters`; older ones have `rope_theta` beside `rope_scaling`.

    Returns:
        rope_theta and partial_rotary_factor (None if absent), rope_type ("default" if absent), and what else there is.
    """
    table = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for key in ("rope_scaling", "rope_parameters"):
        stated = config.get(key) or {}
        if not isinstance(stated, Mapping):
            raise ConfigError(f"config.json: {key} is {stated!r}; expected a table.")
        table |= {name: value for name, value in stated.items() if value is not None}
    table["rope_type"] = table.get("rope_type", table.get("type", "default"))
    return table


def rope(config: HFConfig, *, scaling: tuple[str, ...] = (), partial: float = 1.0) -> dict[str, Any]:
    """`GPTModel` keywords of the rotary embedding.

    Args:
        config: The model's `config.json`.
        scaling: What the family has beyond "default": "llama3" is the scaling of Llama 3.1, which Megatron-core
            computes with the published constants only.
        partial: Fraction of a head that is rotated if the file does not say it; 1 if the family rotates whole heads.
    """
    table = rope_table(config)
    fraction = positive_float(table, "partial_rotary_factor", partial)
    if partial == 1.0 and fraction != 1.0:
        raise ConfigError("config.json: partial_rotary_factor is not 1; this family rotates whole heads in slime.")
    if fraction > 1.0:
        raise ConfigError(f"config.json: partial_rotary_factor is {fraction}; expected at most 1.")
    keywords: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": positive_float(table, "rope_theta", 10000.0),
        "rotary_percent": fraction,
        "rope_scaling": False,
        "rope_scaling_factor": 8.0,
    }
    kind = table["rope_type"]
    if kind == "default":
        return keywords
    if kind not in scaling:
        supported = " or ".join(map(repr, ("default", *scaling)))
        raise ConfigError(
            f"config.json: rope_type is {kind!r}; supported for model_type {config.get('model_type')!r}: {supported}."
        )
    published = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    got = {key: table.get(key) for key in published}
    if got != published:
        raise ConfigError(
            f"config.json: rope scaling 'llama3' with {got}; Megatron-core computes it with {published} only."
        )
    return keywords | {"rope_scaling": True, "rope_scaling_factor": positive_float(table, "factor", 8.0)}
