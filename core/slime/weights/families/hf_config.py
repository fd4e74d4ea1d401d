"""Reading `config.json` strictly.

A setting that changes the computation and that slime does not support is refused: otherwise the trainer would silently
compute something else than the engines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.errors import ConfigError

HFConfig = Mapping[str, Any]


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read `config.json` of a model folder.

    Raises:
        ConfigError: If it is missing or not a JSON object.
    """
    path = folder / "config.json"
    if not path.exists():
        raise ConfigError(f"{path} does not exist; expected a Hugging Face model folder (config.json, *.safetensors).")
    try:
        config = read_json(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds {type(config).__name__}; expected a JSON object.")
    return config


def read_json(path: Path) -> Any:
    """The JSON value in a file of a model folder.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no file, not UTF-8, or no JSON.
    """
    if not path.is_file() and not path.is_dir():
        raise ValueError("it is not a file")  # opening a pipe would wait for its writer
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise ValueError("its lists or objects are nested too deeply") from None


def positive_int(config: HFConfig, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
    """An integer from 1 to `most`. A missing or null key gives the default; without a default it is refused."""
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise ConfigError(f"config.json: {key} is missing; expected a positive integer.")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"config.json: {key} is {value!r}; expected a positive integer, at most {most}.")
    return value


def positive_float(config: HFConfig, key: str, default: float) -> float:
    """A number above 0. A missing or null key gives the default."""
    value = default if config.get(key) is None else config[key]
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


def rope(config: HFConfig, *, llama3_scaling: bool) -> dict[str, Any]:
    """`GPTModel` keywords of the rotary embedding, from either spelling of `config.json`.

    Recent files have `rope_parameters`; older ones have `rope_theta` beside `rope_scaling`.

    Args:
        config: The model's `config.json`.
        llama3_scaling: Whether the family has the scaling of Llama 3.1. Megatron-core computes it with the published
            constants only.
    """
    parameters = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for key in ("rope_scaling", "rope_parameters"):
        table = config.get(key) or {}
        if not isinstance(table, Mapping):
            raise ConfigError(f"config.json: {key} is {table!r}; expected a table.")
        parameters |= table
    if parameters["partial_rotary_factor"] not in (None, 1):
        raise ConfigError("config.json: partial_rotary_factor is not 1; this family rotates whole heads in slime.")
    keywords: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": positive_float(parameters, "rope_theta", 10000.0),
        "rotary_percent": 1.0,
        "rope_scaling": False,
        "rope_scaling_factor": 8.0,
    }
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return keywords
    if kind != "llama3" or not llama3_scaling:
        supported = "'default' or 'llama3'" if llama3_scaling else "'default'"
        raise ConfigError(
            f"config.json: rope_type is {kind!r}; supported for model_type {config.get('model_type')!r}: {supported}."
        )
    published = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    got = {key: parameters.get(key) for key in published}
    if got != published:
        raise ConfigError(
            f"config.json: rope scaling 'llama3' with {got}; Megatron-core computes it with {published} only."
        )
    return keywords | {"rope_scaling": True, "rope_scaling_factor": positive_float(parameters, "factor", 8.0)}
