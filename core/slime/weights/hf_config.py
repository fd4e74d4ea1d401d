"""Reading the JSON files of a Hugging Face model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.errors import ConfigError


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
