"""Reading the JSON files and the tokenizer of a Hugging Face model folder.

Of the Python files that a model folder may have, at most the tokenizer's run here, and only if the user allows it.
"""

from __future__ import annotations

import ast
import copyreg
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.errors import ConfigError

#: names of the class of transformers that reads any tokenizer.json
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
#: a set in transformers' `tokenization_auto.py`: types of models whose folders name a class that may be wrong
_WRONG_CLASS = "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS"


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


def tokenizer_code(folder: Path) -> str | None:
    """The tokenizer's class in a Python file of the model folder, as `FILE.CLASS`; None if it needs no code.

    Raises:
        ConfigError: `tokenizer_config.json` cannot be read.
    """
    named = _auto_map(folder / "tokenizer_config.json")
    classes = named.get("AutoTokenizer") if isinstance(named, dict) else named
    if isinstance(classes, list):  # the slow one and the fast one, which transformers prefers
        classes = next((name for name in reversed(classes) if name is not None), None)
    return None if classes is None else str(classes)


def require_own_code(folder: Path) -> None:
    """Check that the Python classes that a model folder names are in its own files.

    Raises:
        ConfigError: One is elsewhere, such as in a repository of the Hugging Face Hub, from which transformers and the
            engines would download it.
    """
    for file in ("tokenizer_config.json", "config.json"):
        for name in _texts(_auto_map(folder / file)):
            if not re.fullmatch(r"(?!.*--)[\w-]+\.\w+", name):
                raise ConfigError(
                    f"{folder / file} names the class {name} in auto_map; expected FILE.CLASS:"
                    " --trust-remote-code runs only Python files in the folder. Code of another repository of the"
                    " Hugging Face Hub (REPOSITORY--FILE.CLASS) must be copied into it"
                )


def read_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a model folder, as transformers reads it.

    Args:
        folder: The model folder.
        trust_remote_code: Whether a tokenizer that is Python code in the folder may run. Other code there never runs.

    Raises:
        ConfigError: The tokenizer is code that may not run, or a JSON file cannot be read.
        Exception: What transformers and the tokenizer's code raise.
    """
    code = tokenizer_code(folder)
    if code is not None and not trust_remote_code:
        module, _, name = code.rpartition(".")
        json_too = (folder / "tokenizer.json").is_file()
        raise ConfigError(
            f"the tokenizer in {folder} is code: tokenizer_config.json names {name} in {module}.py, which would run"
            " with all your rights. Read that file; if you trust it, allow it with --trust-remote-code"
            + (", or drop auto_map from tokenizer_config.json to use tokenizer.json alone" if json_too else "")
        )
    if code is not None:
        require_own_code(folder)

    if code is None and _has_plain_tokenizer(folder):
        # AutoTokenizer would import torch and the models of transformers first: seconds, and hundreds of megabytes.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)

    from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig

    # AutoTokenizer reads config.json only for the model type, and fails at the other keys of a type it does not know.
    stated = (folder / "config.json").is_file()
    known = not stated or read_hf_config(folder).get("model_type") in CONFIG_MAPPING
    config = None if known else PreTrainedConfig()
    if code is not None and stated and known:
        # With the tokenizer's code, AutoTokenizer would also run the configuration's code.
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # Unless told otherwise, transformers asks on the terminal whether to run code that the folder contains.
    tokenizer = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=code is not None)
    if type(tokenizer).__module__.startswith("transformers_modules."):
        # A module that transformers has made of the folder's file, and that other processes cannot import.
        place = folder.resolve()
        copyreg.pickle(type(tokenizer), lambda _: (_read_trusted, (place,)))
    return tokenizer


def _has_plain_tokenizer(folder: Path) -> bool:
    """Whether AutoTokenizer would read the folder's tokenizer.json with the class that belongs to no model."""
    path = folder / "tokenizer_config.json"
    if not all(file.is_file() for file in (path, folder / "tokenizer.json", folder / "config.json")):
        return False
    if (folder / "tekken.json").exists():  # read by another library where that is installed
        return False
    stated = read_json(path)
    if not isinstance(stated, dict) or stated.get("tokenizer_class") not in PLAIN_CLASSES:
        return False
    wrong = _types_with_wrong_class()
    return wrong is not None and str(read_hf_config(folder).get("model_type")) not in wrong


def _types_with_wrong_class() -> frozenset[str] | None:
    """Transformers' own set, or None if it is not found. Read from the source: importing the module imports torch."""
    import transformers

    source = Path(transformers.__file__).parent / "models" / "auto" / "tokenization_auto.py"
    try:
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == _WRONG_CLASS and node.value:
                return frozenset(ast.literal_eval(node.value))
    except (OSError, ValueError, SyntaxError):
        pass
    return None


def _read_trusted(folder: Path) -> Any:
    return read_tokenizer(folder, trust_remote_code=True)


def _texts(value: Any) -> Iterator[str]:
    """Every text in nested lists and objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _auto_map(path: Path) -> Any:
    """Which Python classes a JSON file of a model folder names for the classes of transformers."""
    if not path.exists():
        return {}
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    return (content.get("auto_map") if isinstance(content, dict) else None) or {}
