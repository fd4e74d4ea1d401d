"""Checks the model folder before a run: its files, its model family, and whether the parallel layout divides it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.config import RunConfig
from slime.config.megatron_checks import layout_problems
from slime.errors import ConfigError
from slime.kit.readers.light_tokenizer import LightTokenizer
from slime.weights import architecture, read_hf_config

#: a model folder has at least one of them
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ModelFacts:
    """The description of a model in its folder."""

    folder: Path
    family: str
    transformer: dict[str, Any]
    gpt: dict[str, Any]

    @property
    def context(self) -> int:
        """Tokens of the longest sequence that the model was made for."""
        return int(self.gpt["max_sequence_length"])

    def __str__(self) -> str:
        sizes = self.transformer
        return (
            f"{self.folder}: {self.family}, {sizes['num_layers']} layers of {sizes['hidden_size']},"
            f" {sizes['num_attention_heads']} heads, vocabulary {self.gpt['vocab_size']}, context {self.context}"
        )


def read_model(folder: Path, option: str) -> ModelFacts:
    """Read the description of the model in a folder that `option` names.

    Raises:
        ConfigError: The folder is missing or incomplete, or slime does not train this family of models.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{option} {folder} is not a folder; expected a Hugging Face model folder on this machine (config.json,"
            " *.safetensors, tokenizer)"
        )
    try:
        found = architecture(read_hf_config(folder))
    except ConfigError as error:
        raise ConfigError(f"{option} {folder}: {error}") from error
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(
            f"{option} {folder} has no tokenizer; expected one of the files {', '.join(_TOKENIZER_FILES)}"
        )
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{option} {folder} has no weights; expected *.safetensors files")
    return ModelFacts(folder, found.family, found.transformer, found.gpt)


# --- does the configuration fit the model ------------------------------------------------------------


def model_problems(config: RunConfig, model: ModelFacts) -> Iterator[str]:
    """Options that do not fit the model."""
    yield from _contradictions(config, model)
    yield from _stop_tokens(config, model)
    yield from _divisions(config, model)


def _contradictions(config: RunConfig, model: ModelFacts) -> Iterator[str]:
    """Megatron flags that do not describe the model in the folder."""
    known = {**model.transformer, **model.gpt}
    known["untie_embeddings_and_output_weights"] = not known["share_embeddings_and_output_weights"]
    for name, value in config.megatron.items():
        if name in known and value != known[name]:
            yield (
                f"--{name.replace('_', '-')} says {value}, and config.json of {model.folder} says {known[name]}."
                " Drop the flag, or point --hf-checkpoint at the model it describes"
            )


def _stop_tokens(config: RunConfig, model: ModelFacts) -> Iterator[str]:
    """Stop tokens that the model cannot generate, such as those of another model."""
    vocabulary = int(model.gpt["vocab_size"])
    outside = [token for token in config.rollout.rollout_stop_token_ids if not 0 <= token < vocabulary]
    if outside:
        yield (
            f"--rollout-stop-token-ids {' '.join(map(str, outside))}: outside the model's vocabulary of {vocabulary}"
            f" tokens, expected ids from 0 to {vocabulary - 1}"
        )


def _divisions(config: RunConfig, model: ModelFacts) -> Iterator[str]:
    """Parallel sizes that do not divide the model's heads or layers."""
    yield from layout_problems(config, model.transformer)
    heads = model.transformer["num_attention_heads"]
    engine = config.cluster.rollout_num_gpus_per_engine
    if heads % engine:
        yield f"--rollout-num-gpus-per-engine {engine} does not divide the model's {heads} attention heads"


# --- tokenizer ---------------------------------------------------------------------------------------


def load_tokenizer(folder: Path, *, with_template: bool) -> Any:
    """Load the tokenizer of a model folder, to count the tokens of prompts.

    A `tokenizer.json` is read with the `tokenizers` library: importing transformers and torch takes seconds. Other
    folders, and chat templates with tags that only transformers has, need transformers.

    Args:
        folder: The model folder.
        with_template: Whether the chat template is needed.

    Raises:
        ConfigError: The tokenizer cannot be loaded.
    """
    import jinja2

    try:
        if (folder / "tokenizer.json").is_file():
            with contextlib.suppress(jinja2.TemplateSyntaxError):
                return _light_tokenizer(folder, with_template=with_template)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise ConfigError(
            f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _light_tokenizer(folder: Path, *, with_template: bool) -> LightTokenizer:
    from tokenizers import Tokenizer

    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    stated = {name: config[name] for name in _SPECIAL_TOKENS if config.get(name) is not None}
    special = {name: str(token["content"] if isinstance(token, dict) else token) for name, token in stated.items()}
    template = _chat_template(folder, config) if with_template else None
    return LightTokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")), template, special)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The default chat template, from its own file or from the configuration."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((str(entry["template"]) for entry in template if entry.get("name") == "default"), None)
    return template
