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


def boolean(config: HFConfig, key: str, default: bool | None = None) -> bool:
    """True or false. A missing or null key gives the default; without a default it is refused."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {key} is {value!r}; expected true or false.")
    return value


def no_effect(config: HFConfig, *keys: str) -> None:
    """Settings that change no number of the model, such as those of another trainer; all others must be read."""
    for key in keys:
        config.get(key)


def full_attention(config: HFConfig) -> None:
    """Refuse attention over a window, in all layers or in some."""
    require(config, "use_sliding_window", (None, False), "attention over a window")
    no_effect(config, "sliding_window", "max_window_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        return
    other = sorted({str(kind) for kind in (kinds if isinstance(kinds, list | tuple) else [kinds])} - {"full_attention"})
    if other:
        raise ConfigError(
            f"config.json: layer_types has {other}; slime computes only 'full_attention' for"
            f" {config.get('model_type')}."
        )
    if len(kinds) != config.get("num_hidden_layers"):
        raise ConfigError(
            f"config.json: layer_types has {len(kinds)} entries, and num_hidden_layers is"
            f" {config.get('num_hidden_layers')!r}; expected one for each layer."
        )


#: rope_type -> what its table may have besides `_ROPE`
_SCALED = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings"),
}
_ROPE = ("rope_theta", "partial_rotary_factor", "rope_type", "type")


def rope_table(config: HFConfig) -> dict[str, Any]:
    """The settings of the rotary embedding, from either spelling of `config.json`.

    Recent files have `rope_parameters`; older ones have `rope_theta` beside `rope_scaling`. If a file has both tables,
    transformers takes `rope_scaling` and forgets the other, with its `rope_theta`; such a file must say the same twice.

    Returns:
        rope_theta and partial_rotary_factor (None if absent), rope_type ("default" if absent), and what else there is.

    Raises:
        ConfigError: The tables differ, or have a setting that is not computed.
    """
    tables = {key: _rope_table(config, key) for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    if len(tables) == 2 and tables["rope_scaling"] != tables["rope_parameters"]:
        raise ConfigError(
            f"config.json: rope_scaling says {tables['rope_scaling']} and rope_parameters says"
            f" {tables['rope_parameters']}. transformers and the engines would take the first alone. State"
            " everything in rope_parameters, and remove rope_scaling."
        )
    return next(iter(tables.values()), None) or _rope_table(config, "rope_parameters")


def _rope_table(config: HFConfig, key: str) -> dict[str, Any]:
    stated = config.get(key) or {}
    if not isinstance(stated, Mapping):
        raise ConfigError(f"config.json: {key} is {stated!r}; expected a table.")
    for name in _ROPE:
        if stated.get(name, 0) is None or (name == "rope_theta" not in stated and config.get(name, 0) is None):
            raise ConfigError(f"config.json: {name} of the rotary embedding is null. State its value, or remove it.")
    table = {name: stated.get(name, config.get(name)) for name in ("rope_theta", "partial_rotary_factor")}
    table |= {name: value for name, value in stated.items() if value is not None and name != "type"}
    kind = table["rope_type"] = stated.get("rope_type", stated.get("type", "default"))
    if kind in ("llama3", "yarn"):
        table.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    known = (*_ROPE, *_SCALED[kind]) if isinstance(kind, str) and kind in _SCALED else table
    # yarn's ends of the ramp are whole numbers, which a file may say too
    other = {name: value for name, value in table.items() if name not in known and (name, value) != ("truncate", True)}
    if other:
        nested = any(isinstance(value, Mapping) for value in other.values())
        raise ConfigError(
            f"config.json: {key} has {other}, which slime does not compute for rope_type {kind!r}"
            + (": it computes one table for all layers, not one for each kind." if nested else f"; it knows {known}.")
        )
    table.pop("truncate", None)
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
    return keywords | {"rope_scaling": True, "rope_scaling_factor": positive_float(table, "factor")}
