"""Checks the model folder before a run: its files and weights, and whether the configuration fits the model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.cli.output import progress
from slime.cli.preflight_tokens import special_token_problems
from slime.cli.text_layout import count
from slime.config import RunConfig
from slime.config.eval_sets import eval_sets
from slime.config.flag_table import flags_of
from slime.config.flags import MEGATRON
from slime.config.learning_rate import learning_rate_problems
from slime.config.megatron_checks import layout_problems
from slime.errors import CheckpointError, ConfigError, SlimeError
from slime.plugin.architecture import Architecture
from slime.weights.folder_problems import expected_shapes, folder_problems
from slime.weights.fp8 import Block, block_of, scale_of
from slime.weights.hf_config import read_hf_config
from slime.weights.lora import ADAPTER_CONFIG, adapter_tensors, lora_of
from slime.weights.mapping import first_names
from slime.weights.models import Models
from slime.weights.stated_model import contradictions, predicting_layers
from slime.weights.stored import FLOATS, FP8, not_finite, stored_tensors

#: a model folder has at least one of them
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
#: Megatron's options with names that its declarations do not list, and slime does
_CHECKED = ("optimizer", "moe_router_load_balancing_type")
#: a name on the Hugging Face Hub
_HUB_NAME = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*", re.ASCII)
#: where scripts/models/*.sh look for models; nobody's name on the Hub, which uses it itself
_SCRIPTS_FOLDER = "models"


@dataclass(frozen=True)
class ModelFacts:
    """The description of a model in its folder."""

    folder: Path
    architecture: Architecture
    #: the block for which fp8 weights have one scale; None if the weights are not quantised
    block: Block | None = None

    @property
    def transformer(self) -> dict[str, Any]:
        """Sizes of the layers, in Megatron's terms."""
        return self.architecture.transformer

    @property
    def gpt(self) -> dict[str, Any]:
        """Vocabulary, positions and context, in Megatron's terms."""
        return self.architecture.gpt

    @property
    def context(self) -> int:
        """Tokens of the longest sequence that the model was made for."""
        return int(self.gpt["max_sequence_length"])

    def __str__(self) -> str:
        sizes = self.transformer
        text = (
            f"{self.folder}: {self.architecture.family}, {sizes['num_layers']} layers of {sizes['hidden_size']},"
            f" {sizes['num_attention_heads']} heads, vocabulary {self.gpt['vocab_size']}, context {self.context}"
        )
        if self.block is not None:
            rows, columns = self.block
            text += f"; fp8, one scale for each {rows} x {columns} weights: trained dequantised, exported in bfloat16"
        return text

    @property
    def not_trained(self) -> str | None:
        """What the folder holds and the run does not train, or None."""
        layers = predicting_layers(self.architecture.carried)
        if not layers or self.architecture.predicts:
            return None
        return f"{count(layers, 'layer')} for multi-token prediction: not trained, and copied into exports"


def read_model(folder: Path, option: str, models: Models) -> ModelFacts:
    """Read the description of the model in a folder that `option` names; `missing_parts` says what else it lacks.

    Raises:
        ConfigError: The folder or its description is missing, or slime does not train this family of models.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{option} {folder} is not a folder; expected a Hugging Face model folder on this machine (config.json,"
            f" *.safetensors, tokenizer){_how_to_download(folder, option)}"
        )
    try:
        found = models.read(folder)
    except SlimeError as error:
        raise ConfigError(f"{option} {folder}: {error}") from error
    if (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"{option} {folder} has an {ADAPTER_CONFIG}: transformers would compute the model with these adapters, and"
            " slime and the engines without them. Move the adapter to a folder of its own; --lora-load starts from it,"
            " and `merge_and_unload` of peft puts it into the weights"
        )
    return ModelFacts(folder, found, block_of(read_hf_config(folder)))


def missing_parts(folder: Path, option: str) -> Iterator[str]:
    """What the folder of a described model lacks that a run needs, and a plan of one does not."""
    if not has_tokenizer(folder):
        yield f"{option} {folder} has no tokenizer; expected one of the files {', '.join(_TOKENIZER_FILES)}"
    if not has_weights(folder):
        yield f"{option} {folder} has no weights; expected *.safetensors files"


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder has a tokenizer, of whatever kind."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def has_weights(folder: Path) -> bool:
    """Whether a model folder has weights, complete or not."""
    return any(folder.glob("*.safetensors"))


def _how_to_download(folder: Path, option: str) -> str:
    """The command that downloads a model, for users who wrote its name on the Hub; empty for other names."""
    if folder.exists() or not _HUB_NAME.fullmatch(str(folder)):
        return ""
    if folder.parent.name == _SCRIPTS_FOLDER:
        return (
            f". Download it first: `hf download OWNER/{folder.name} --local-dir {folder}`, with the model's owner on"
            " the Hugging Face Hub (those of scripts/models are in the scripts)"
        )
    return (
        f". If {folder} is a model of the Hugging Face Hub, download it first: `hf download {folder} --local-dir"
        f" {folder.name}`, then {option} {folder.name}"
    )


# --- weights -----------------------------------------------------------------------------------------


def weight_problems(model: ModelFacts, option: str, *, everything: bool, backbone: bool = False) -> Iterator[str]:
    """Weights that are missing, misshapen, quantized, or contain NaN or infinity.

    Args:
        model: The model whose folder is read.
        option: The flag that names it, for messages.
        everything: Look for NaN and infinity in all numbers, instead of a sample.
        backbone: Whether only the layers are used, as by a critic: the folder may lack the output layer or have the
            head of a reward model instead.

    Raises:
        CheckpointError: A file is missing, truncated or damaged, or is outside the folder.
    """
    stored, where = stored_tensors(model.folder), f"{option} {model.folder}"
    yield from folder_problems(where, stored, model.architecture, model.block, backbone=backbone, everything=everything)
    used = {name: stored[name] for name in expected_shapes(model.architecture, backbone=backbone) if name in stored}
    readable = {name: tensor for name, tensor in used.items() if tensor.dtype in (*FLOATS, FP8)}
    scales = {scale_of(name): stored.get(scale_of(name)) for name, tensor in used.items() if tensor.dtype == FP8}
    readable |= {name: tensor for name, tensor in scales.items() if tensor is not None and tensor.dtype in FLOATS}
    with progress(f"reading the weights of {where}:", "tensor") as tell:
        wrong = list(not_finite(readable, everything=everything, tell=tell))
    if wrong:
        yield (
            f"{where} has NaN or infinity in {len(wrong)} tensors: {first_names(wrong)}. Every loss would be NaN:"
            " the model was damaged when it was trained, converted or copied"
        )


def engine_problem(model: ModelFacts, *, synced: bool, on_gpu: bool) -> str | None:
    """Why engines cannot start from the model folder, or None.

    Args:
        model: The model.
        synced: Whether the trainer sends them weights: they are not quantised, and engines with fp8 weights would take
            them without the scales, so that they would compute something else without an error.
        on_gpu: Whether engines run on GPUs, where they can compute with fp8 weights.
    """
    if model.block is None or (on_gpu and not synced):
        return None
    why = "the weights that training sends are not quantised" if synced else "SGLang has no fp8 arithmetic on a CPU"
    return (
        f"--hf-checkpoint {model.folder} holds fp8 weights, and the engines cannot start from it: {why}. Convert it"
        f" first: `slime convert {model.folder} {model.folder.name}-bf16`, then --hf-checkpoint"
        f" {model.folder.name}-bf16"
    )


# --- does the configuration fit the model ------------------------------------------------------------


def trainer_problems(config: RunConfig, model: ModelFacts, *, with_critic: bool) -> Iterator[str]:
    """What only the ranks of a run without other problems would refuse."""
    yield from learning_rate_problems(config, with_critic=with_critic)
    named = [flag for flag in flags_of(MEGATRON) if flag.key in config.megatron] if config.megatron else []
    # What the packages of another machine are is not known here.
    if config.cluster.ray_address is None and any(one.type.is_open and one.key not in _CHECKED for one in named):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about packages that only GPUs need
            from slime.train.settings import train_settings  # Megatron itself, which takes seconds

            try:
                train_settings(config, model.architecture)
            except ConfigError as error:
                yield str(error)


def model_problems(config: RunConfig, model: ModelFacts) -> Iterator[str]:
    """Options that do not fit the model."""
    yield from contradictions(config.megatron, model.architecture, str(model.folder))
    yield from _adapters(config, model)
    yield from _contexts(config, model)
    yield from _routing(config, model)
    yield from _stop_tokens(config, model)
    yield from special_token_problems(model.folder, int(model.gpt["vocab_size"]))
    yield from _divisions(config, model)


def _adapters(config: RunConfig, model: ModelFacts) -> Iterator[str]:
    """Adapters on modules that the model does not have, or that contain NaN or infinity."""
    try:
        adapters = lora_of(config.lora, model.architecture)
    except (CheckpointError, ConfigError) as error:
        yield str(error)
        return
    folder = config.lora.lora_load
    if adapters is not None and folder is not None:
        for name in not_finite(adapter_tensors(Path(folder)), everything=True):
            yield f"--lora-load {folder} has NaN or infinity in {name}: it was damaged when it was made or copied"


def _contexts(config: RunConfig, model: ModelFacts) -> Iterator[str]:
    """Engines with a longer context than the model's, which SGLang refuses."""
    engine = config.sglang.get("context_length")
    if engine is not None and engine > model.context:
        yield (
            f"--sglang-context-length {engine} is longer than the context of the model in {model.folder},"
            f" {model.context} tokens (max_position_embeddings). Drop it, or use at most {model.context}"
        )


def _routing(config: RunConfig, model: ModelFacts) -> Iterator[str]:
    """Options of routers, for a model that has none."""
    if config.rollout.use_rollout_routing_replay and not model.transformer.get("num_moe_experts"):
        yield (
            f"--use-rollout-routing-replay is for mixtures of experts, and the model in {model.folder}"
            f" ({model.architecture.family}) has none. Drop it"
        )


def length_notes(config: RunConfig, model: ModelFacts) -> Iterator[str]:
    """Limits that cannot both be reached."""
    rollout = config.rollout
    context = rollout.rollout_max_context_len or int(config.sglang.get("context_length", model.context))
    prompt, response = rollout.rollout_max_prompt_len, rollout.rollout_max_response_len
    if prompt is not None and response < context < prompt + response:
        yield (
            f"--rollout-max-prompt-len {prompt} + --rollout-max-response-len {response} = {prompt + response} tokens,"
            f" and the context has {context}: prompts may have at most {context - response}"
        )


def _stop_tokens(config: RunConfig, model: ModelFacts) -> Iterator[str]:
    """Stop tokens that the model cannot generate, such as those of another model."""
    vocabulary = int(model.gpt["vocab_size"])
    stated = {"--rollout-stop-token-ids": tuple(config.rollout.rollout_stop_token_ids)}
    stated |= {
        f"{one.where}, stop_token_ids": one.stop_token_ids
        for one in eval_sets(config)
        if one.stop_token_ids != stated["--rollout-stop-token-ids"]
    }
    for option, tokens in stated.items():
        if outside := [token for token in tokens if token >= vocabulary]:
            yield (
                f"{option} {' '.join(map(str, outside))}: outside the model's vocabulary of {vocabulary}"
                f" tokens, expected ids from 0 to {vocabulary - 1}"
            )


def _divisions(config: RunConfig, model: ModelFacts) -> Iterator[str]:
    """Parallel sizes that do not divide the model's heads or layers."""
    yield from layout_problems(config, model.transformer)
    heads = model.transformer["num_attention_heads"]
    engine = config.cluster.rollout_num_gpus_per_engine
    if heads % engine:
        yield f"--rollout-num-gpus-per-engine {engine} does not divide the model's {heads} attention heads"
