"""What transformers takes a `config.json` to say, and what of it a model family does not read. Needs no torch.

Importing a configuration class of transformers imports torch, which takes seconds. Its fields, their defaults and their
other names are therefore read from its source, and tests compare them with the class itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from slime.config.installed import class_named, declarations, package_folder, parse_source
from slime.errors import ConfigError
from slime.weights.fp8 import QUANTISED

#: settings that change no number of a forward pass: descriptions, and what transformers' own generation would use
_NO_NUMBERS = frozenset(
    """
    _name_or_path architectures auto_map bad_words_ids chunk_size_feed_forward do_sample dtype early_stopping
    finetuning_task id2label initializer_range keys_to_ignore_at_inference label2id length_penalty max_length
    max_new_tokens min_length model_type name_or_path num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores pretraining_tp problem_type repetition_penalty return_dict
    router_aux_loss_coef task_specific_params temperature tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p use_cache
    """.split()  # noqa: SIM905 - one name a line would be a page
) | frozenset(QUANTISED)

#: what every file must state: with transformers' defaults, a file that lacks one would describe another model
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a configuration class.

    Attributes:
        defaults: What a field is if `config.json` does not have it. Sizes have no default here.
        optional: Fields that may be null.
        names: Field -> another name of the same field.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    names: Mapping[str, str] = field(default_factory=dict)

    def other_name(self, key: str) -> str | None:
        """The other name of a field, if it has two."""
        return self.names.get(key) or next((name for name, other in self.names.items() if other == key), None)


@cache
def fields_of(causal_lm: str) -> Fields:
    """The fields of the configuration of a model class of transformers; none if it has no such class."""
    name = causal_lm.removesuffix("ForCausalLM")
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    path = package_folder("transformers", "transformers", "models") / module / f"configuration_{module}.py"
    found = class_named(parse_source(path), f"{name}Config") if path.is_file() else None
    if found is None:
        return Fields()
    defaults: dict[str, Any] = {}
    optional: set[str] = set()
    names: dict[str, str] = {}
    for one in declarations(found.body):
        value = one.value
        if isinstance(value, ast.Call):  # a field with bounds: interval(min=0.0, max=1.0)(default=0.02)
            value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), value)
        defaults |= _literal(one.name, value)
        if "None" in ast.unparse(one.annotation):
            optional.add(one.name)
    for node in ast.walk(found):
        match node:
            case ast.Assign(targets=[ast.Name(id="attribute_map")]):
                names = ast.literal_eval(node.value)
            case ast.Assign(targets=[ast.Name(id="default_theta")]):
                defaults |= _literal("rope_theta", node.value)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="kwargs"), attr="setdefault"),
                args=[ast.Constant(value=key), value],
            ):
                defaults |= _literal(str(key), value)
    return Fields({key: value for key, value in defaults.items() if key not in _SIZES}, frozenset(optional), names)


def _literal(name: str, value: ast.expr | None) -> dict[str, Any]:
    """A default, unless it is computed."""
    try:
        return {} if value is None else {name: ast.literal_eval(value)}
    except ValueError:
        return {}


class ReadSettings(Mapping[str, Any]):
    """A `config.json` with the defaults of transformers, which remembers the settings that were read."""

    def __init__(self, stated: Mapping[str, Any], fields: Fields) -> None:
        """Complete a `config.json`.

        Raises:
            ConfigError: A field is null that transformers needs, or is stated twice with different values.
        """
        self._stated, self._fields = stated, fields
        self._values = {**fields.defaults, **stated}
        self._read: set[str] = set()
        for name, other in fields.names.items():
            given = [key for key in (name, other) if key in stated] or [name, other]
            if stated.get(given[0]) != stated.get(given[-1]):
                raise ConfigError(
                    f"config.json: {name} is {stated[name]!r} and {other} is {stated[other]!r}, and both mean the same."
                    " Remove the wrong one."
                )
            for key in given:
                if key in self._values:
                    self._values |= dict.fromkeys((name, other), self._values[key])
                    break
        for key, value in stated.items():
            if value is None and key in fields.defaults and key not in fields.optional:
                raise ConfigError(
                    f"config.json: {key} is null, which transformers does not take. State its value, or remove it if it"
                    f" is {_shown(fields.defaults[key])}, the default."
                )

    def __getitem__(self, key: str) -> Any:
        self._read |= {key, self._fields.other_name(key) or key}
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def not_read(self) -> list[str]:
        """The settings that nobody read and that may change the computation, as "NAME is VALUE"."""
        found = []
        for key, value in self._stated.items():
            if key in self._read or key in _NO_NUMBERS or key.endswith("_token_id"):
                continue
            if key in self._fields.defaults:
                default = self._fields.defaults[key]
                if value != default and (value or default):
                    found.append(f"{key} is {_shown(value)} (default: {_shown(default)})")
            elif value and _known(key):
                found.append(f"{key} is {_shown(value)}")
        return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@cache
def _known(key: str) -> bool:
    """Whether some model of the installed transformers or SGLang has this setting; any other has no effect."""
    word = re.escape(key)
    used = re.compile(rf"(?m)^    {word}:|\bconfig\.{word}\b|config,\s*[\"']{word}[\"']")
    return any(key in text and used.search(text) is not None for text in _sources())


@cache
def _sources() -> tuple[str, ...]:
    """The source of every model."""
    paths: list[Path] = [*package_folder("transformers", "transformers", "models").glob("*/configuration_*.py")]
    for folder in ("models", "configs"):
        try:
            paths += package_folder("sglang", "sglang", "srt", folder).glob("*.py")
        except ConfigError:
            continue  # not installed: no engine will read the setting
    return tuple(path.read_text(encoding="utf-8", errors="replace") for path in paths)
