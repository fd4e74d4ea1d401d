"""A model folder's tokenizer for counting tokens, without transformers (whose import takes seconds and torch).

Folders with a `tokenizer.json` are read by the `tokenizers` library, the same code that transformers calls;
other folders, and chat templates that need transformers' own extensions, are left to transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.data.light_tokenizer import LightTokenizer
from slime.errors import ConfigError

#: any of them is a tokenizer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(folder: Path, *, with_template: bool) -> Any:
    """The tokenizer of a model folder.  Raises `ConfigError` when it cannot be loaded."""
    import jinja2

    try:
        if (folder / "tokenizer.json").is_file():
            try:
                return _counting(folder, with_template=with_template)
            except jinja2.TemplateSyntaxError:
                pass  # a template with transformers' own tags
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise ConfigError(
            f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _counting(folder: Path, *, with_template: bool) -> LightTokenizer:
    from tokenizers import Tokenizer

    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    special = {name: _content(config[name]) for name in _SPECIAL if config.get(name) is not None}
    template = _chat_template(folder, config) if with_template else None
    return LightTokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")), template, special)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The default template: a file of its own, or a value of the configuration (one, or several by name)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((str(entry["template"]) for entry in template if entry.get("name") == "default"), None)
    return template


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
