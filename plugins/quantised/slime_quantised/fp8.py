"""`--rollout-quantization fp8`: the model that engines hold, and the tensors they are sent. Needs no torch by itself.

Engines compute products with weights in 8 bits, and the trainer with those it trains. Every weight that the published
fp8 folders of the model's family hold in 8 bits (`Architecture.fp8`) becomes two tensors: the numbers, under its name,
and the scales of its blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slime.errors import ConfigError
from slime.plugin.architecture import Architecture, Rule, Shape

if TYPE_CHECKING:
    from slime.rollout.train_batch import TrainBatch
    from slime.train.model import TrainableModel
    from slime.weights.shards import NamedTensors
    from slime.weights.verify import WeightCheck

_BLOCK = (128, 128)
_SCALES = "_scale_inv"
#: problems of a kind that are listed
_LISTED = 4
#: the first number of the compute capability of GPUs for which SGLang rounds and packs scales anew as it loads them
_BLACKWELL = 10
#: options of engines that slime sets itself, or that would make their weights others than those that are sent
_SET_HERE = ("quantization", "load_format", "json_model_override_args")


class Fp8:
    """See `slime.weights.quantised.Quantisation`."""

    def __init__(self, model: Architecture) -> None:
        """
        Args:
            model: The model as it is trained.

        Raises:
            ConfigError: Its family does not say which weights are quantised.
        """
        if not model.fp8:
            raise ConfigError(
                f"--rollout-quantization fp8: the model family {model.family} does not say which of its weights are"
                " quantised (Architecture.fp8). Drop the flag, or let the family say it"
            )
        self._trained = model
        #: rules of the weights that are quantised, by their Megatron names
        self.rules = {rule.megatron: rule for rule in model.rules if _is_quantised(rule, model.fp8)}
        self._names = {name for rule in self.rules.values() for name in rule.hf}
        config = {**model.engine_config, "quantization_config": self._config(model)}
        self.model = replace(model, rules=tuple(self._in_engines(model)), engine_config=config)

    def _config(self, model: Architecture) -> dict[str, Any]:
        kept = {
            name.removesuffix(".weight")
            for rule in model.rules
            for name, shape in rule.hf.items()
            if len(shape) > 1 and name not in self._names
        }
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(_BLOCK),
            "modules_to_not_convert": sorted(kept),
        }

    def _in_engines(self, model: Architecture) -> Iterator[Rule]:
        for rule in model.rules:
            yield rule
            if rule.megatron in self.rules:
                shapes = {name + _SCALES: _grid(shape) for name, shape in rule.hf.items()}
                yield replace(rule, megatron=rule.megatron + _SCALES, engine=rule.engine + _SCALES, hf=shapes)

    @property
    def engine_options(self) -> dict[str, Any]:
        """SGLang's options: the model folder is not quantised, so engines start without its weights and wait for those
        that are sent before the first response."""
        return {"load_format": "dummy"}

    def tensors(self, named: NamedTensors) -> NamedTensors:
        """The trainer's tensors as engines get them.

        Raises:
            ConfigError: The trainer's GPUs, and so the engines', are of a kind on which that would not work.
        """
        import torch

        from slime_quantised.blocks import quantised

        for name, tensor in named:
            if name in self._names:
                if tensor.is_cuda:
                    refuse_unfit(torch.cuda.get_device_capability(tensor.device))
                numbers, scales = quantised(tensor)
                yield name, numbers
                yield name + _SCALES, scales
            else:
                yield name, tensor

    def check(self, tp_sizes: Iterable[int], *, ep_size: int, dp_size: int = 1) -> WeightCheck:
        """Compares the engines' weights with those that were sent: see `slime_quantised.check`."""
        from slime_quantised.check import QuantisedCheck

        return QuantisedCheck(self._trained, self._names, tp_sizes, ep_size=ep_size, dp_size=dp_size)

    def gap(self, policy: TrainableModel, batch: TrainBatch) -> dict[str, float]:
        """See `slime_quantised.gap.dequantised_gap`."""
        from slime_quantised.gap import dequantised_gap

        return dequantised_gap(policy, batch, self.rules)

    def problems(self, options: Mapping[str, Any], *, tp_size: int, compared: bool) -> Iterator[str]:
        """Why engines cannot hold the quantised weights.

        Args:
            options: SGLang's options.
            tp_size: Ranks of an engine.
            compared: Whether their weights will be compared with the trainer's.
        """
        for name in _SET_HERE:
            if options.get(name) is not None:
                flag = name.replace("_", "-")
                yield f"--sglang-{flag} {options[name]}: --rollout-quantization fp8 decides it. Drop one of them"
        if options.get("speculative_algorithm"):
            yield (
                "--sglang-speculative-algorithm: the weights of the draft model are not quantised, and engines would"
                " expect that. Drop it or --rollout-quantization"
            )
        joined: dict[str, list[Rule]] = {}
        for rule in self.rules.values():
            joined.setdefault(rule.engine, []).append(rule)
        found: dict[str, None] = {}
        for rules in joined.values():
            for rule in rules:
                last = rule is rules[-1]
                ranks = _ranks(rule, options, tp_size)
                found.update(dict.fromkeys(_undivided(rule, ranks, alone=len(rules) == 1, last=last)))
        if found:
            yield (
                f"--rollout-quantization fp8: {_BLOCK[0]} x {_BLOCK[1]} weights share a scale, and an engine's ranks"
                f" must hold whole blocks of what they divide or join ({tp_size} with --rollout-num-gpus-per-engine):"
                f" {_first(found)}. Use fewer ranks for each engine, or drop the flag"
            )
        if compared and (uneven := dict.fromkeys(self._uneven())):
            yield (
                "--check-weight-update-equal with --rollout-quantization fp8: SGLang's checksum needs whole blocks in"
                f" every row: {_first(uneven)}. Drop one of them"
            )

    def _uneven(self) -> Iterator[str]:
        for rule in self.rules.values():
            for name, (_, columns) in rule.hf.items():
                if columns % _BLOCK[1]:
                    yield f"{_everywhere(name)} has {columns} columns"


def refuse_unfit(capability: tuple[int, int]) -> None:
    """Raise a ConfigError for GPUs of this compute capability, if engines there would not hold what they are sent."""
    if capability[0] == _BLACKWELL:
        raise ConfigError(
            f"--rollout-quantization fp8 on GPUs of compute capability {capability[0]}.{capability[1]}: there SGLang"
            " rounds the scales to powers of two and lays them and the experts out anew once they are loaded, and later"
            " weights would not fit. Drop the flag, or use GPUs such as H100 and H200"
        )


def _ranks(rule: Rule, options: Mapping[str, Any], tp_size: int) -> int:
    """The ranks of an engine that divide a rule's tensors."""
    if rule.expert is not None:
        return max(1, tp_size // int(options.get("ep_size") or 1))
    if ".self_attention." in rule.megatron and options.get("enable_dp_attention"):
        return max(1, tp_size // int(options.get("dp_size") or 1))
    if ".mlp.linear_fc" in rule.megatron:
        return int(options.get("moe_dense_tp_size") or tp_size)
    return tp_size


def _first(problems: Collection[str]) -> str:
    """The first problems, and how many more there are."""
    more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    return "; ".join(list(problems)[:_LISTED]) + more


def _everywhere(name: str) -> str:
    """The name of a tensor for all layers and experts."""
    return re.sub(r"[.][0-9]+[.]", ".*.", name)


def _is_quantised(rule: Rule, ends: tuple[str, ...]) -> bool:
    return all(name.endswith(ends) and len(shape) == len(_BLOCK) for name, shape in rule.hf.items())


def _grid(shape: Shape) -> Shape:
    """The shape of a weight's scales."""
    return tuple(math.ceil(length / size) for length, size in zip(shape, _BLOCK, strict=True))


def _undivided(rule: Rule, ranks: int, *, alone: bool, last: bool) -> Iterator[str]:
    """The tensors of a rule of which a rank of an engine would not hold whole blocks.

    Args:
        rule: The rule.
        ranks: Ranks that divide the tensors.
        alone: Whether the engine's parameter holds nothing else.
        last: Whether it comes last in it.
    """
    dim = rule.parallel_dim
    for number, (name, shape) in enumerate(rule.hf.items()):
        parts = ranks * rule.parts
        if dim is None:
            dim, parts = 0, 1
            if alone or last:
                continue
        elif rule.expert is None and ranks == 1 and (dim == 1 or (alone and len(rule.hf) * rule.parts == 1)):
            continue
        elif rule.layout == "qkv" and number > 0:
            parts = min(ranks, rule.groups)
        if shape[dim] % parts or (shape[dim] // parts) % _BLOCK[dim]:
            what = "rows" if dim == 0 else "columns"
            on_a_rank = f", {shape[dim] / parts:g} in a part" if parts > 1 else ""
            yield f"{_everywhere(name)} has {shape[dim]} {what}{on_a_rank}"
