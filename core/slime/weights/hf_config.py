"""Reading the JSON files and the tokenizer of a Hugging Face model folder."""

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


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model folder, as transformers reads it. Code in the folder does not run.

    Raises:
        ConfigError: `config.json` cannot be read.
        Exception: What transformers raises.
    """
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig

    # AutoTokenizer reads config.json only for the model type, and fails at the other keys of a type it does not know.
    stated = (folder / "config.json").is_file()
    known = not stated or read_hf_config(folder).get("model_type") in CONFIG_MAPPING
    # Unless told otherwise, transformers asks on the terminal whether to run code that the folder contains.
    return AutoTokenizer.from_pretrained(folder, config=None if known else PreTrainedConfig(), trust_remote_code=False)
