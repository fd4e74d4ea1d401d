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

#: settings that change no number of a forward pass: descriptions, what transformers' own generation would use, the
#: implementation of attention, and dropouts, which neither engines nor the trainer compute
_NO_NUMBERS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path add_cross_attention architectures
    attention_dropout attention_probs_dropout_prob attn_implementation attn_pdrop auto_map bad_words_ids
    chunk_size_feed_forward classifier_dropout do_sample dropout dtype early_stopping embd_pdrop finetuning_task
    hidden_dropout hidden_dropout_prob id2label initializer_range is_decoder keys_to_ignore_at_inference label2id
    length_penalty max_length max_new_tokens max_seq_len max_sequence_length min_length model_max_length model_type name
    name_or_path num_beams num_labels num_return_sequences output_attentions output_hidden_states output_router_logits
    output_scores pretraining_tp problem_type repetition_penalty resid_pdrop return_dict router_aux_loss_coef seq_length
    task task_specific_params temperature tokenizer_class top_k top_p torch_dtype torchscript transformers_version type
    typical_p use_cache use_return_dict version
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

#: what only a file can say, whatever the default: how many layers its folder holds that no forward pass needs
_HELD = ("num_mtp_layers", "num_nextn_predict_layers")


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
    name, path = causal_lm.removesuffix("ForCausalLM"), _transformers_source(causal_lm, "configuration")
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


def _transformers_source(causal_lm: str, kind: str) -> Path:
    """Where transformers has the configuration of a model class ("configuration") or the class itself ("modeling")."""
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", causal_lm.removesuffix("ForCausalLM")).lower()
    return package_folder("transformers", "transformers", "models") / module / f"{kind}_{module}.py"


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
        defaults = {key: value for key, value in fields.defaults.items() if key not in _HELD}
        self._values = {**defaults, **stated}
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

    def not_read(self, causal_lm: str) -> list[str]:
        """The settings that the family of a model class did not read and that may change what others compute.

        Args:
            causal_lm: The model class. What neither transformers nor SGLang reads for it has no effect.

        Returns:
            Each as "NAME is VALUE".
        """
        found = []
        for key, value in self._stated.items():
            if key in self._read or key in _NO_NUMBERS or key.endswith("_token_id"):
                continue
            if key in self._fields.defaults:
                default = self._fields.defaults[key]
                if value != default and (value or default):
                    found.append(f"{key} is {_shown(value)} (default: {_shown(default)})")
            elif value and _has_reader(key, causal_lm):
                found.append(f"{key} is {_shown(value)}")
        return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@cache
def _has_reader(key: str, causal_lm: str) -> bool:
    """Whether anything that computes this model reads a setting. What is only assigned is not read."""
    config, word = r"\b(?:hf_(?:text_)?)?config", re.escape(key)
    used = re.compile(rf"{config}\.{word}\b(?!\s*=[^=])|{config}(?:,|\.get\(|\[)\s*[\"']{word}[\"']")
    return any(key in text and used.search(text) is not None for text in _readers(causal_lm))


@cache
def _readers(causal_lm: str) -> tuple[str, ...]:
    """The source that reads the settings of a model class: transformers' and SGLang's model, and what SGLang shares."""
    paths = {_transformers_source(causal_lm, kind) for kind in ("configuration", "modeling")}
    try:
        engine = package_folder("sglang", "sglang", "srt")
    except ConfigError:  # not installed: no engine will read the setting
        return tuple(path.read_text(encoding="utf-8") for path in paths if path.is_file())
    models = {path: path.read_text(encoding="utf-8") for path in (engine / "models").rglob("*.py")}
    own = re.compile(rf"(?m)^class {re.escape(causal_lm)}\b")
    found = [path for path, text in models.items() if own.search(text)]
    for path in found:  # and the models that it is built from
        for name in re.findall(r"(?m)^\s*from sglang\.srt\.models\.([\w.]+) import", models[path]):
            imported = engine.joinpath("models", *name.split(".")).with_suffix(".py")
            if imported in models and imported not in found:
                found.append(imported)
    shared = [
        engine / "configs" / "model_config.py",
        *engine.glob("layers/*.py"),
        *engine.glob("layers/attention/*.py"),
    ]
    return tuple(path.read_text(encoding="utf-8") for path in (*paths, *found, *shared) if path.is_file())
