"""The model folder before a run: complete, of a known kind, and of a size the parallel layout divides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.cli.preflight_tokenizer import TOKENIZER_FILES
from slime.config import RunConfig
from slime.errors import ConfigError
from slime.weights import architecture, read_hf_config


@dataclass(frozen=True)
class ModelFacts:
    """What the folder says about the model."""

    folder: Path
    family: str
    transformer: dict[str, Any]
    gpt: dict[str, Any]

    @property
    def context(self) -> int:
        """Tokens of the longest sequence it is made for."""
        return int(self.gpt["max_sequence_length"])

    def __str__(self) -> str:
        sizes = self.transformer
        return (
            f"{self.folder}: {self.family}, {sizes['num_layers']} layers of {sizes['hidden_size']},"
            f" {sizes['num_attention_heads']} heads, vocabulary {self.gpt['vocab_size']}, context {self.context}"
        )


def read_model(folder: Path, option: str) -> ModelFacts:
    """The model of a folder that `option` names.

    Raises `ConfigError` for a folder that is missing, incomplete or of a kind slime does not train.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{option} {folder} is no folder; expected a Hugging Face model folder on this machine (config.json,"
            " *.safetensors, tokenizer)"
        )
    try:
        found = architecture(read_hf_config(folder))
    except ConfigError as error:
        raise ConfigError(f"{option} {folder}: {error}") from error
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"{option} {folder} has no tokenizer; expected one of the files {', '.join(TOKENIZER_FILES)}")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{option} {folder} has no weights; expected *.safetensors files")
    return ModelFacts(folder, found.family, found.transformer, found.gpt)


def model_problems(config: RunConfig, model: ModelFacts) -> Iterator[str]:
    """What of the configuration does not fit the model."""
    yield from _contradictions(config, model)
    yield from _stop_tokens(config, model)
    yield from _divisions(config, model)


def _contradictions(config: RunConfig, model: ModelFacts) -> Iterator[str]:
    """Megatron flags that describe another model than the folder's."""
    known = {**model.transformer, **model.gpt}
    known["untie_embeddings_and_output_weights"] = not known["share_embeddings_and_output_weights"]
    for name, value in config.megatron.items():
        if name in known and value != known[name]:
            yield (
                f"--{name.replace('_', '-')} says {value}, and config.json of {model.folder} says {known[name]}."
                " Drop the flag, or point --hf-checkpoint at the model it describes"
            )


def _stop_tokens(config: RunConfig, model: ModelFacts) -> Iterator[str]:
    """Token ids that the model cannot produce would never stop anything."""
    vocabulary = int(model.gpt["vocab_size"])
    outside = [token for token in config.rollout.rollout_stop_token_ids if not 0 <= token < vocabulary]
    if outside:
        yield (
            f"--rollout-stop-token-ids {' '.join(map(str, outside))}: outside the model's vocabulary of {vocabulary}"
            f" tokens, expected ids from 0 to {vocabulary - 1}"
        )


def _divisions(config: RunConfig, model: ModelFacts) -> Iterator[str]:
    """Heads and layers that can be divided among ranks, and heads among an engine's devices."""
    heads, layers = model.transformer["num_attention_heads"], model.transformer["num_layers"]
    groups = model.transformer["num_query_groups"]
    stated = config.megatron
    tensor, pipeline = stated.get("tensor_model_parallel_size", 1), stated.get("pipeline_model_parallel_size", 1)
    if tensor > 0 and heads % tensor:
        yield f"--tensor-model-parallel-size {tensor} does not divide the model's {heads} attention heads"
    elif tensor > 0 and groups % tensor and tensor % groups:
        yield f"--tensor-model-parallel-size {tensor} does not fit the model's {groups} key-value heads"
    uneven = any("num_layers_in_" in name or name == "pipeline_model_parallel_layout" for name in stated)
    per_chunk = stated.get("num_layers_per_virtual_pipeline_stage")
    if per_chunk is not None and pipeline > 0 and layers % (pipeline * per_chunk):
        yield (
            f"--num-layers-per-virtual-pipeline-stage {per_chunk}: the model's {layers} layers are no multiple of"
            f" {pipeline} pipeline stages x {per_chunk}"
        )
    elif pipeline > 0 and layers % pipeline and not uneven:
        yield (
            f"--pipeline-model-parallel-size {pipeline} does not divide the model's {layers} layers. State uneven"
            " stages with --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
        )
    engine = config.cluster.rollout_num_gpus_per_engine
    if heads % engine:
        yield f"--rollout-num-gpus-per-engine {engine} does not divide the model's {heads} attention heads"
