"""Low-rank adapters (LoRA, Hu et al., 2021) on Megatron's parallel linear layers, with a frozen model.

A layer y = W x becomes y = W x + alpha / rank x B A x. Of a column-parallel layer, A is on every rank and B is divided
as W is; of a row-parallel layer, A is divided and B is on every rank. Only activations of the adapter's rank are
exchanged. A layer that every rank holds whole has whole adapters.

A layer that joins several modules (q, k, v; gate, up) has an A for each of them, since that is what adapters of the
separate modules are. The adapters of a chunk are one submodule of it, so that they can be saved without the model.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from slime.errors import CheckpointError, ConfigError, writing
from slime.plugin.architecture import Architecture, Rule
from slime.train.features import Feature
from slime.train.layers import NormedRowParallelLinear
from slime.weights.hf_save import write_file
from slime.weights.lora import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    ADAPTER_WEIGHTS,
    ADAPTERS_DESCRIPTION,
    Lora,
    adapter_rules,
    adapter_shapes,
    lora_of,
    module_of,
    peft_config,
    peft_reader,
)
from slime.weights.shards import (
    ADAPTERS,
    NamedTensors,
    ReadSlice,
    Shard,
    ValuesOf,
    gather_tensors,
    global_name,
    read_shard,
)
from slime.weights.stored import sample_digest

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.train.checkpoint_io import Write


class Adapter(torch.nn.Module):
    """This rank's part of the adapters of one linear layer.

    Attributes:
        a: [modules x rank, in] the modules' A, one below the other.
        b: [out, rank] the B of all modules of the layer, in the layout of its weight; zero for a module without an
            adapter.
        rules: How `a` and `b` correspond to the tensors of the modules.
    """

    def __init__(self, config: Any, linear: Any, rule: Rule, lora: Lora) -> None:
        """Make zero matrices for `linear`, whose weight has this rule; `config` is its TransformerConfig."""
        super().__init__()
        self._dim = rule.parallel_dim
        self._scale, self._group = lora.scale, parallel_state.get_tensor_model_parallel_group()
        self._sequence_parallel = bool(config.sequence_parallel)
        self.rules = adapter_rules(rule, lora)
        rows, columns = linear.weight.shape
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.a = torch.nn.Parameter(torch.zeros(lora.rank * len(self.rules[0].hf), columns, **like))
        self.b = torch.nn.Parameter(torch.zeros(rows, lora.rank, **like))
        divided = {0: self.b, 1: self.a}.get(-1 if self._dim is None else self._dim)
        for matrix in (self.a, self.b):
            if matrix is divided:
                set_tensor_model_parallel_attributes(matrix, True, self._dim, 1)
            else:
                # finalize_model_grads sums these over the tensor-parallel ranks: each saw a part of the sequence.
                matrix.sequence_parallel = self._sequence_parallel  # type: ignore[attr-defined]  # Megatron reads it
        self._owner: Tensor | None
        self.register_buffer("_owner", self._owners(rule, lora), persistent=False)

    def _owners(self, rule: Rule, lora: Lora) -> Tensor | None:
        """[out, modules] 1 where a row of B belongs to a module with an adapter; None if all rows are of one module."""
        if len(rule.hf) == 1:
            return None
        adapted = [name for name in rule.hf if module_of(name) in lora.modules]
        number = {name: adapted.index(name) if name in adapted else -1 for name in rule.hf}
        numbers: ReadSlice = lambda name, _dim, start, stop: torch.full((stop - start, 1), number[name])  # noqa: E731
        of_row = read_shard(rule, (self.b.shape[0], 1), self._group.rank(), numbers)
        return (of_row == torch.arange(len(adapted))).to(self.b)

    def fill(self, read: ReadSlice) -> None:
        """Take A and B from the tensors of the modules."""
        with torch.no_grad():
            for parameter, rule in zip((self.a, self.b), self.rules, strict=True):
                parameter.copy_(read_shard(rule, tuple(parameter.shape), self._group.rank(), read))

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the layer's output, for its input x [s, b, in]."""
        low = F.linear(x, self.a)
        match self._dim, self._sequence_parallel:
            case 0, True:
                low = gather_from_sequence_parallel_region(low, True, self._group)
            case 0, False:
                low = copy_to_tensor_model_parallel_region(low, self._group)
            case 1, True:
                low = reduce_scatter_to_sequence_parallel_region(low, self._group)
            case 1, False:
                low = reduce_from_tensor_model_parallel_region(low, self._group)
        return F.linear(low * self._scale, self._wide_b())

    def merged(self, weight: Tensor) -> Tensor:
        """The layer's weight with the adapters added, in the weight's type."""
        with torch.no_grad():
            update = self._wide_b().float() @ self.a.float()
            return torch.add(weight.float(), update, alpha=self._scale).to(weight.dtype)

    def _wide_b(self) -> Tensor:
        """[out, modules x rank]: each row of B in the columns of its module, so that one product serves all modules."""
        if self._owner is None:
            return self.b
        return (self._owner.unsqueeze(2) * self.b.unsqueeze(1)).flatten(1)

    def sharded_state_dict(self, prefix: str, metadata: dict[str, Any]) -> dict[str, Any]:
        """The parts of `a` and `b` that this rank saves, as Megatron describes them."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"a": self.a, "b": self.b},
            prefix,
            {} if self._dim is None else {"b": 0} if self._dim == 0 else {"a": 1},
            tp_group=self._group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.rules[1].layout == "concat" and len(self.rules[1].hf) == 2:
            state[f"{prefix}b"] = apply_swiglu_sharded_factory(state[f"{prefix}b"], ())
        return state


class Adapters(torch.nn.ModuleDict):
    """The adapters of one model chunk, by the name of their layer in the whole model, with slashes for dots."""

    def named(self) -> Iterator[tuple[str, Adapter]]:
        """(name of the layer, its adapter)"""
        for name, adapter in self.items():
            assert isinstance(adapter, Adapter)
            yield name.replace("/", "."), adapter

    def sharded_state_dict(self, prefix: str = "", metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """As of a Megatron module."""
        assert metadata is not None
        state: dict[str, Any] = {}
        for name, adapter in self.items():
            assert isinstance(adapter, Adapter)
            state |= adapter.sharded_state_dict(f"{prefix}{name}.", metadata)
        return state


class AdapterTraining(Feature):
    """Freezes the model and trains adapters of its layers."""

    def __init__(self, config: RunConfig, model: Architecture | None) -> None:
        """
        Args:
            config: The run's configuration.
            model: The model of `--hf-checkpoint`, if the run has one.

        Raises:
            ConfigError: No folder names the model's modules, or the options do not fit them.
        """
        lora = None if model is None else lora_of(config.lora, model)
        if model is None or lora is None:
            raise ConfigError(
                "adapters (--lora-rank, --lora-load) need --hf-checkpoint, which names the model's modules."
            )
        self._lora, self._model = lora, model
        self._base, self._seed = str(config.checkpoint.hf_checkpoint), config.run.seed
        self._given = None if config.lora.lora_load is None else Path(config.lora.lora_load)

    def build(self, chunks: Sequence[Any]) -> None:
        """Freeze the bare chunks and give their layers adapters, which are zero."""
        lora, model = self._lora, self._model
        rules = {
            module_of(rule.megatron): rule
            for rule in model.rules
            if any(module_of(hf) in lora.modules for hf in rule.hf)
        }
        for chunk in chunks:
            chunk.requires_grad_(False)
            adapters = Adapters()
            for name, module in list(chunk.named_modules()):
                layer = module_of(global_name(f"{name}.weight", chunk))
                if layer in rules:
                    adapter = Adapter(chunk.config, module, rules[layer], lora)
                    adapters[layer.replace(".", "/")] = adapter
                    _connect(adapter, module)
            setattr(chunk, ADAPTERS, adapters)
            if chunk.pre_process and chunk.config.recompute_granularity is not None:
                # Megatron's recomputation gives no gradients to what is inside it if no input of it has one.
                chunk.embedding.register_forward_hook(_with_gradient)

    def start(self, chunks: Sequence[Any]) -> None:
        """Give the adapters the values of `--lora-load`, or PEFT's: A is random and B zero, so they change nothing yet.

        The values do not depend on the parallel layout.
        """
        shapes = adapter_shapes(self._lora, self._model)
        given = partial(_initial, shapes, self._seed) if self._given is None else peft_reader(self._given)

        def read(name: str, dim: int, start: int, stop: int) -> Tensor:
            # A module without an adapter in a layer that joins several; only rows of its B are asked for.
            return given(name, dim, start, stop) if name in shapes else torch.zeros(stop - start, self._lora.rank)

        for _, adapter in _named(chunks):
            adapter.fill(read)

    def named(self, chunks: Sequence[Any]) -> NamedTensors:
        """The full tensors of the adapters under PEFT's names, on rank 0; the others must iterate too and get none."""
        shapes = adapter_shapes(self._lora, self._model)
        gathered = gather_tensors(_shards(chunks), {})
        return ((name, tensor) for name, tensor in gathered if name in shapes)

    def write(self, adapters: NamedTensors, model_folder: Path) -> None:
        """Write these adapters and their `adapter_config.json` into a model folder, as its folder `adapter`."""
        folder = model_folder / ADAPTER_FOLDER
        folder.mkdir()
        tensors = {name: tensor.cpu().clone().contiguous() for name, tensor in adapters}
        text = json.dumps(peft_config(self._lora, self._model, self._base), indent=2) + "\n"
        (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
        write_file(folder / ADAPTER_WEIGHTS, tensors)

    def save(self, folder: Path, write: Write) -> None:  # noqa: ARG002 - the adapters are the policy's weights
        """Write beside saved adapters what they are without: rank, alpha, modules, and a digest of the frozen model.

        Raises:
            DiskFullError: The disk is full.
        """
        if dist.get_rank() != 0:
            return
        path = folder / ADAPTERS_DESCRIPTION
        described = asdict(self._lora) | {"base_sha256": sample_digest(Path(self._base))}
        with writing(path):
            path.write_text(json.dumps(described, indent=1), encoding="utf-8")

    def check(self, folder: Path, *, weights_only: bool) -> None:  # noqa: ARG002 - adapters fit one model alone
        """Refuse a checkpoint that is not of these adapters on this model, before anything of it is read.

        Raises:
            CheckpointError: It is of other adapters, of another model, or of a run without adapters.
        """
        found = _saved_adapters(folder)
        if found is None:
            raise CheckpointError(
                f"{folder} was saved by a run without adapters, and this run trains {self._lora}. Resume without"
                " --lora-rank, or write the checkpoint as a model folder (slime convert CHECKPOINT DIR) and train"
                " adapters on that."
            )
        held, digest = found
        if held != self._lora:
            raise CheckpointError(
                f"{folder} holds {held}, and this run trains {self._lora}: the same numbers would mean another model."
                " Use the options of the run that saved it."
            )
        if digest != sample_digest(Path(self._base)):
            raise CheckpointError(
                f"{folder} holds adapters of another model than --hf-checkpoint {self._base}: its weights are not those"
                " of the run that saved them. Use the folder of that run."
            )


def refuse_adapters(folder: Path) -> None:
    """Refuse a checkpoint that holds adapters, in a run that trains none (`CheckpointError`)."""
    if (found := _saved_adapters(folder)) is not None:
        held, _ = found
        raise CheckpointError(
            f"{folder} holds only adapters ({held}), and this run trains the whole model. Add"
            f" --lora-rank {held.rank} --lora-alpha {held.alpha:g} --lora-targets {' '.join(held.kinds)}, or write"
            " the checkpoint as a model folder (slime convert CHECKPOINT DIR) and start from that."
        )


def _saved_adapters(folder: Path) -> tuple[Lora, str] | None:
    """The adapters of a checkpoint and the digest of their model; None if it has none."""
    path = folder / ADAPTERS_DESCRIPTION
    if not path.is_file():
        return None
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        held = Lora(int(saved["rank"]), float(saved["alpha"]), tuple(map(str, saved["modules"])))
        return held, str(saved["base_sha256"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _connect(adapter: Adapter, linear: Any) -> None:
    """Add the adapter to the layer's product; of a layer with a norm behind it, before the norm."""
    if isinstance(linear, NormedRowParallelLinear):
        added: list[Tensor] = []
        linear.register_forward_pre_hook(lambda _, inputs: added.append(adapter(inputs[0])))
        linear.post_norm.register_forward_pre_hook(lambda _, inputs: (inputs[0] + added.pop(),))
    else:
        linear.register_forward_hook(lambda _, inputs, outputs: (outputs[0] + adapter(inputs[0]), *outputs[1:]))


def _with_gradient(_embedding: Any, _inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _initial(shapes: dict[str, tuple[int, ...]], seed: int, name: str, dim: int, start: int, stop: int) -> Tensor:
    """PEFT's initial values: A uniform within 1 / sqrt(in), B zero."""
    whole = torch.zeros(shapes[name])
    if name.endswith("lora_A.weight"):
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        bound = whole.shape[1] ** -0.5
        whole.uniform_(-bound, bound, generator=generator)
    return whole.narrow(dim, start, stop - start)


def _named(chunks: Sequence[Any]) -> Iterator[tuple[str, Adapter]]:
    for chunk in chunks:
        if isinstance(adapters := getattr(chunk, ADAPTERS, None), Adapters):
            yield from adapters.named()


def merged_values(chunks: Sequence[Any]) -> ValuesOf:
    """Gives the values of a parameter with its adapters merged into them, by its name in the rules."""
    adapters = {f"{layer}.weight": adapter for layer, adapter in _named(chunks)}

    def values(name: str, parameter: Tensor) -> Tensor:
        adapter = adapters.get(name)
        return parameter if adapter is None else adapter.merged(parameter)

    return values


def _shards(chunks: Sequence[Any]) -> Iterator[Shard]:
    for _, adapter in _named(chunks):
        for parameter, rule in zip((adapter.a, adapter.b), adapter.rules, strict=True):
            yield rule, parameter.detach


# --- checkpoints --------------------------------------------------------------------------------------


def saved_part(chunk: Any) -> Any:
    """What checkpoints hold of a bare chunk: its adapters if it has some, since the rest is frozen; otherwise all."""
    return getattr(chunk, ADAPTERS, chunk)
