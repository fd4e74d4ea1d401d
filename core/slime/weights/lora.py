"""Low-rank adapters (LoRA, Hu et al., 2021): which modules of a model have one, and their files in PEFT's format.

An adapter adds alpha / rank x B A to a weight, with A [rank, in] and B [out, rank]. Modules have their Hugging Face
names. This module needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.errors import CheckpointError, ConfigError, did_you_mean
from slime.plugin.architecture import Architecture, Rule
from slime.weights.folder_problems import wrong_shapes
from slime.weights.hf_config import read_json
from slime.weights.mapping import first_names, wrong_names
from slime.weights.stored import FLOATS, StoredTensor, read_header

if TYPE_CHECKING:
    from slime.config.weight_options import LoraOptions
    from slime.weights.shards import ReadSlice

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
#: what saved adapters are, in the trainer's part of a checkpoint
ADAPTERS_DESCRIPTION = "adapters.json"
#: the folder of the adapters inside an exported model; beside config.json transformers would add them a second time
ADAPTER_FOLDER = "adapter"
ALL_LINEAR = "all-linear"
#: the modules with a weight that adapters are made for: the linear layers between embedding and output layer
_LINEAR = re.compile(r"decoder\.layers\.\d+\.(?!.*\bexperts\.).*\blinear_\w+\.weight")
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
#: fields of PEFT's configuration that change the computation -> the values with which they do not
_OFF: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (None,),
    "alpha_pattern": (None, {}),
    "bias": (None, "none"),
    "exclude_modules": (None, []),
    "fan_in_fan_out": (None, False),
    "layer_replication": (None,),
    "lora_bias": (None, False),
    "megatron_config": (None,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "trainable_token_indices": (None,),
    "use_dora": (None, False),
    "use_qalora": (None, False),
}
#: ways to initialise that leave the base weights alone; the others move a part of them into the adapter
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of one model.

    Attributes:
        rank: Rows of A and columns of B.
        alpha: The update is multiplied by alpha / rank.
        modules: The modules with an adapter, by their full Hugging Face names, in the order of the model.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank

    @property
    def kinds(self) -> list[str]:
        """The last parts of the modules' names, such as `q_proj`, in the order of the model."""
        return _kinds(self.modules)

    def __str__(self) -> str:
        on = f"{len(self.modules)} modules ({', '.join(self.kinds)})"
        return f"adapters of rank {self.rank} and alpha {self.alpha:g} on {on}"


def _kinds(modules: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(module.rpartition(".")[2] for module in modules))


def lora_of(options: LoraOptions, model: Architecture) -> Lora | None:
    """The adapters that the options ask for, or None for full training.

    Raises:
        ConfigError: A target is no module of the model, or options contradict the folder of --lora-load.
        CheckpointError: The folder is not readable, or its adapters are not of this model or of a supported kind.
    """
    if options.lora_load is not None:
        return _loaded(options, model)
    if options.lora_rank is None:
        return None
    alpha = float(options.lora_rank if options.lora_alpha is None else options.lora_alpha)
    return Lora(options.lora_rank, alpha, _chosen(options.lora_targets, model))


def linear_modules(model: Architecture) -> dict[str, Rule]:
    """The modules that can have an adapter, with the rules of their weights."""
    return {module_of(name): rule for rule in model.rules if _LINEAR.fullmatch(rule.megatron) for name in rule.hf}


def module_of(weight: str) -> str:
    """The name of the module with this weight."""
    return weight.removesuffix(".weight")


def _chosen(targets: Collection[str], model: Architecture) -> tuple[str, ...]:
    """The modules with these names, matched as PEFT does: whole names, or whole parts at the end of them."""
    linear = tuple(linear_modules(model))
    if ALL_LINEAR in targets:
        return linear
    for target in targets:
        if not any(_ends_with(module, target) for module in linear):
            kinds = _kinds(linear)
            raise ConfigError(
                f"--lora-targets {target}: the model has no linear layer of this name; expected {ALL_LINEAR}, or some"
                f" of {', '.join(kinds)}, or full names of modules.{did_you_mean(target, [*kinds, ALL_LINEAR])}"
            )
    return tuple(module for module in linear if any(_ends_with(module, target) for target in targets))


def _ends_with(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")


# --- tensors ------------------------------------------------------------------------------------------


def tensor_name(module: str, part: str) -> str:
    """The name in PEFT's files of the matrix A or B of a module."""
    return f"base_model.model.{module}.lora_{part}.weight"


def adapter_shapes(lora: Lora, model: Architecture) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the adapters, by its name in PEFT's files."""
    base = model.shapes
    shapes: dict[str, tuple[int, ...]] = {}
    for module in lora.modules:
        rows, columns = base[f"{module}.weight"]
        shapes |= {tensor_name(module, "A"): (lora.rank, columns), tensor_name(module, "B"): (rows, lora.rank)}
    return shapes


def adapter_rules(rule: Rule, lora: Lora) -> tuple[Rule, Rule]:
    """How Megatron's A and B of one linear layer correspond to A and B of its Hugging Face modules.

    A layer whose weight joins several modules has their A, one below the other, and one B in the layout of the weight.
    A has only the modules with an adapter. The rows of B of the others are zero and are left out of files.
    """
    adapted = [module_of(name) for name in rule.hf if module_of(name) in lora.modules]
    a_shapes = {tensor_name(module, "A"): (lora.rank, rule.shapes[0][1]) for module in adapted}
    b_shapes = {tensor_name(module_of(name), "B"): (rows, lora.rank) for name, (rows, _) in rule.hf.items()}
    layer, divides_rows, divides_columns = module_of(rule.megatron), rule.parallel_dim == 0, rule.parallel_dim == 1
    return (
        Rule(f"{layer}.lora_a", a_shapes, "", parallel_dim=1 if divides_columns else None),
        Rule(f"{layer}.lora_b", b_shapes, "", rule.layout, 0 if divides_rows else None, rule.parts, rule.groups),
    )


# --- PEFT's files -------------------------------------------------------------------------------------


def peft_config(lora: Lora, model: Architecture, base: str) -> dict[str, Any]:
    """The content of `adapter_config.json`.

    Args:
        lora: The adapters.
        model: The model that they belong to.
        base: Where the model is.
    """
    # Newer PEFT takes a module with the name of an expert's for the experts of the whole layer, but not if the weight
    # itself is named.
    of_experts = {kind for rule in model.rules if rule.expert is not None for kind in _kinds(map(module_of, rule.hf))}
    by_weight = [module for module in lora.modules if module.rpartition(".")[2] in of_experts]
    by_name = tuple(module for module in lora.modules if module not in by_weight)
    short = _kinds(by_name)
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": short if _chosen(short, model) == by_name else list(by_name),
        **({"target_parameters": [f"{module}.weight" for module in by_weight]} if by_weight else {}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def _loaded(options: LoraOptions, model: Architecture) -> Lora:
    folder = Path(str(options.lora_load))
    lora = _read_config(folder, _adapted_modules(folder, model), linear_modules(model))
    # A saved configuration states the default too.
    chosen = None if options.lora_targets == [ALL_LINEAR] else _chosen(options.lora_targets, model)
    stated = {
        "--lora-rank": (options.lora_rank, lora.rank),
        "--lora-alpha": (options.lora_alpha, lora.alpha),
        "--lora-targets": (chosen, lora.modules),
    }
    for flag, (mine, held) in stated.items():
        if mine is not None and mine != held:
            raise ConfigError(
                f"{flag} contradicts --lora-load {folder}, whose adapters are: {lora}. Drop the flag, or train new"
                " adapters without --lora-load."
            )
    expected, found = adapter_shapes(lora, model), adapter_tensors(folder)
    problems = wrong_names(found, set(expected), set()) + wrong_shapes(found, expected)
    problems += [f"{name} is of type {tensor.dtype}" for name, tensor in found.items() if tensor.dtype not in FLOATS]
    if problems:
        raise CheckpointError(
            f"--lora-load {folder} does not fit the model: {'; '.join(problems[:8])}. Is it an adapter of another"
            " model?"
        )
    return lora


def adapter_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a PEFT folder, as the header of its file describes them.

    Raises:
        CheckpointError: There is no such file, or it is damaged.
    """
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise CheckpointError(
            f"--lora-load {folder} has no {ADAPTER_WEIGHTS}; expected the folder of a PEFT adapter, as"
            " `PeftModel.save_pretrained` or slime's --save-hf writes it (there: DIR/adapter)."
        )
    return read_header(path)


def _adapted_modules(folder: Path, model: Architecture) -> tuple[str, ...]:
    """The modules that have tensors in the folder, in the order of the model."""
    linear = linear_modules(model)
    names = list(adapter_tensors(folder))
    other = [name for name in names if (match := _TENSOR.fullmatch(name)) is None or match[1] not in linear]
    if other:
        raise CheckpointError(
            f"--lora-load {folder} has {len(other)} tensors that belong to no linear layer of the model:"
            f" {first_names(other)}."
        )
    adapted = {module for module in linear if tensor_name(module, "A") in names or tensor_name(module, "B") in names}
    return tuple(module for module in linear if module in adapted)


def _read_config(folder: Path, modules: tuple[str, ...], linear: Collection[str]) -> Lora:
    path = folder / ADAPTER_CONFIG
    try:
        config: Mapping[str, Any] = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{path} holds no JSON object.")
    problems = list(_unsupported(config, linear))
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        problems.append(f"r is {rank!r}, expected a positive whole number")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < float("inf"):
        problems.append(f"lora_alpha is {alpha!r}, expected a positive number")
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}.")
    assert isinstance(rank, int) and isinstance(alpha, int | float)
    # A rank-stabilised adapter is multiplied by alpha / sqrt(rank).
    return Lora(rank, float(alpha) * (rank**0.5 if config.get("use_rslora") else 1.0), modules)


def _unsupported(config: Mapping[str, Any], linear: Collection[str]) -> Iterator[str]:
    """Settings with which PEFT would compute something else than alpha / rank x B A beside the base weights."""
    if config.get("peft_type") != "LORA":
        yield f"peft_type is {config.get('peft_type')!r}, expected 'LORA'"
    for name, off in _OFF.items():
        if config.get(name) not in off:
            yield f"{name} is {config[name]!r}, which slime does not compute; expected {off[-1]!r}"
    for target in config.get("target_parameters") or ():
        if not any(_ends_with(f"{module}.weight", str(target)) for module in linear):
            yield f"target_parameters has {target!r}, which is the weight of no linear layer of the model"
    init = config.get("init_lora_weights")
    if init not in _INITS:
        yield (
            f"init_lora_weights is {init!r}, with which PEFT changes the base weights. Convert it first"
            " (path_initial_model_for_weight_conversion of `save_pretrained`)"
        )


def peft_reader(folder: Path) -> ReadSlice:
    """Reads slices of the tensors of a PEFT folder, which `lora_of` has checked."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / ADAPTER_WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    return lambda name, dim, start, stop: tensors[name].narrow(dim, start, stop - start)
