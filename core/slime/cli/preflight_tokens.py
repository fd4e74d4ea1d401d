"""Checks the tokens of a model folder before a run: its tokenizer, and ids that the model has no embedding for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.cli.text_layout import count
from slime.errors import ConfigError
from slime.weights.hf_config import read_json, read_tokenizer, tokenizer_code

if TYPE_CHECKING:
    from slime.kit.readers.light_tokenizer import LightTokenizer

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: tokens that a note names
_NAMED = 3


def load_tokenizer(folder: Path, *, with_template: bool, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model folder, to count the tokens of prompts.

    A `tokenizer.json` is read with the `tokenizers` library: importing transformers and torch takes seconds. Other
    folders, and chat templates with tags that only transformers has, need transformers.

    Args:
        folder: The model folder.
        with_template: Whether the chat template is needed.
        trust_remote_code: Whether a tokenizer that is code in the folder may run.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or is code that may not run.
    """
    import jinja2

    try:
        if (folder / "tokenizer.json").is_file() and tokenizer_code(folder) is None:
            with contextlib.suppress(jinja2.TemplateSyntaxError):
                return _light_tokenizer(folder, with_template=with_template)
        tokenizer = read_tokenizer(folder, trust_remote_code=trust_remote_code)
        if with_template and getattr(tokenizer, "chat_template", None):
            _require_template(tokenizer)
        return tokenizer
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _require_template(tokenizer: Any) -> None:
    """Raise `ConfigError` for a template that is no Jinja, by which no row could be used."""
    import jinja2

    from slime.kit.readers.tokenize import template_error

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template cannot be read: {template_error(tokenizer, error)}") from error
    except Exception:  # noqa: BLE001 - it may refuse this chat; those of the data are tried later
        return


def _light_tokenizer(folder: Path, *, with_template: bool) -> LightTokenizer:
    from tokenizers import Tokenizer

    from slime.kit.readers.light_tokenizer import LightTokenizer

    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    stated = {name: config[name] for name in _SPECIAL_TOKENS if config.get(name) is not None}
    special = {name: str(token["content"] if isinstance(token, dict) else token) for name, token in stated.items()}
    template = _chat_template(folder, config) if with_template else None
    return LightTokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")), template, special, str(folder))


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The default chat template, from its own file or from the configuration."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((str(entry["template"]) for entry in template if entry.get("name") == "default"), None)
    return template


# --- ids ---------------------------------------------------------------------------------------------


def special_token_problems(folder: Path, vocabulary: int) -> Iterator[str]:
    """Ids in the model folder at which no response can end, or for which transformers has no embedding."""
    for file, key in (
        ("config.json", "eos_token_id"),
        ("generation_config.json", "eos_token_id"),
        ("config.json", "pad_token_id"),
    ):
        outside = [one for one in _token_ids(folder, file, key) if one >= vocabulary]
        if outside:
            yield (
                f"{folder / file}: {key} {' '.join(map(str, outside))} is outside the model's vocabulary of"
                f" {vocabulary} tokens, expected ids from 0 to {vocabulary - 1}"
            )


def _token_ids(folder: Path, file: str, key: str) -> list[int]:
    """The ids that a file of a model folder has under a key; none if it has no such key."""
    path = folder / file
    if not path.is_file():
        return []
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    stated = content.get(key) if isinstance(content, dict) else None
    ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise ConfigError(f"{path}: {key} is {stated!r}; expected the id of a token, or a list of ids")
    return list(ids)


def end_notes(folder: Path) -> Iterator[str]:
    """Tokens at which responses end, if the files of the folder disagree."""
    stated = {file: _token_ids(folder, file, "eos_token_id") for file in ("config.json", "generation_config.json")}
    first, second = map(set, stated.values())
    if first and second and not first <= second:
        said = ", ".join(f"{file} {' '.join(map(str, ids))}" for file, ids in stated.items())
        yield f"{folder} has several eos_token_id: {said}. Engines end a response at any of them"


def check_vocabulary(folder: Path, rows: int, tokenizer: Any) -> str | None:
    """Look for tokens of the tokenizer in `folder` for which its model, with embeddings of `rows` ids, has none.

    Returns:
        A note about tokens that were added to the tokenizer, such as one for padding that no prompt contains. Prompts
        that do contain one are bad rows: see `slime.cli.preflight_data.look`.

    Raises:
        ConfigError: The tokenizer's own vocabulary is too large.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ids = (tokenizer if backend is None else backend).get_vocab()
    outside = sorted((number, name) for name, number in ids.items() if number >= rows)
    if not outside:
        return None
    own = ids.keys() - tokenizer.get_added_vocab() if backend is None else backend.get_vocab(with_added_tokens=False)
    has = f"and the model has embeddings for ids 0 to {rows - 1} (vocab_size {rows})"
    for number, name in reversed(outside):
        if name in own:
            raise ConfigError(
                f"the tokenizer in {folder} has the token {name!r} with id {number}, {has}: the tokenizer belongs"
                " to another model"
            )
    more = f" and {len(outside) - _NAMED} more" if len(outside) > _NAMED else ""
    named = ", ".join(f"{name!r} ({number})" for number, name in outside[:_NAMED])
    return (
        f"the tokenizer in {folder} has {count(len(outside), 'added token')} without an embedding, {named}{more},"
        f" {has}: texts that contain one are refused"
    )
