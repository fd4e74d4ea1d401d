"""Model folders with fp8 weights and one scale for each block of them. Needs no torch.

`X` holds numbers of 8 bits (e4m3), and `X_scale_inv` the number by which each block of them is multiplied. Such weights
are dequantised when they are read; nothing else of slime ever sees them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from slime.errors import ConfigError
from slime.weights.mapping import first_names
from slime.weights.stored import FLOATS, FP8, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

#: rows and columns of a block
Block = tuple[int, int]

#: keys of `config.json` that say how weights are quantised
QUANTISED = ("quantization_config", "compression_config")
_SCALE = "_scale_inv"
_SCALE_TYPES = ("F32", "BF16", "F16")


def block_of(config: Mapping[str, Any]) -> Block | None:
    """The block for which a model has one scale, from its `config.json`; None for a model that is not quantised.

    Raises:
        ConfigError: It is quantised in another way.
    """
    for key in QUANTISED:
        if stated := config.get(key):
            return _block(key, stated)
    return None


def _block(key: str, stated: Any) -> Block:
    method, block, form = (
        (stated.get(name) for name in ("quant_method", "weight_block_size", "fmt"))
        if isinstance(stated, Mapping)
        else (stated, None, None)
    )
    if method == "fp8" and form in (None, "e4m3") and isinstance(block, list) and len(block) == 2:
        rows, columns = block
        if all(type(size) is int and size > 0 for size in block):
            return rows, columns
    described = f"quant_method {method!r}"
    if method == "fp8":
        described += f", weight_block_size {block!r}, fmt {form!r}"
    raise ConfigError(
        f"config.json: {key} describes weights that slime cannot read ({described}). It trains weights in full"
        " precision, and of the quantised ones it can dequantise those in fp8 with one scale for each block"
        " (quant_method 'fp8', weight_block_size [128, 128], fmt 'e4m3'). Use the model before quantisation."
    )


def scale_of(name: str) -> str:
    """The name of the scales of an fp8 tensor."""
    return name + _SCALE


def weight_names(names: Collection[str], block: Block | None) -> frozenset[str]:
    """The names of a folder's tensors, scales left out."""
    found = frozenset(names)
    if block is None:
        return found
    return frozenset(name for name in found if not (name.endswith(_SCALE) and name.removesuffix(_SCALE) in found))


def fp8_names(stored: Mapping[str, StoredTensor], beginnings: tuple[str, ...]) -> set[str]:
    """The fp8 tensors whose names begin with one of these beginnings."""
    return {name for name, tensor in stored.items() if tensor.dtype == FP8 and name.startswith(beginnings)}


def type_problems(stored: Mapping[str, StoredTensor], used: Iterable[str], block: Block | None) -> list[str]:
    """What is wrong with the types of the tensors `used` of a folder, and with their scales."""
    other, wrong = [], []
    for name in used:
        tensor = stored[name]
        if tensor.dtype == FP8 and block is not None:
            if (problem := _scale_problem(name, tensor, stored.get(scale_of(name)), block)) is not None:
                wrong.append(problem)
        elif tensor.dtype not in FLOATS:
            other.append(f"{name} ({tensor.dtype})")
    problems = []
    if other:
        problems.append(
            f"{len(other)} tensors that are not floating-point numbers of 16 to 64 bits: {first_names(other)}."
            " Use the model before quantization"
        )
    if wrong:
        problems.append(f"{len(wrong)} fp8 tensors that cannot be dequantised: {first_names(wrong)}")
    return problems


def _scale_problem(name: str, tensor: StoredTensor, scale: StoredTensor | None, block: Block) -> str | None:
    if scale is None:
        return f"{name} has no {scale_of(name)}"
    if len(tensor.shape) != 2:
        return f"{name} has {len(tensor.shape)} dimensions, expected 2"
    expected = tuple(-(-length // size) for length, size in zip(tensor.shape, block, strict=True))
    if scale.shape != expected:
        return f"{scale_of(name)} has shape {list(scale.shape)}, expected {list(expected)}"
    if scale.dtype not in _SCALE_TYPES:
        return f"{scale_of(name)} is of type {scale.dtype}, expected one of {', '.join(_SCALE_TYPES)}"
    return None


def blocks_between(start: int, stop: int, size: int) -> tuple[int, int]:
    """The first block of entries start..stop along a dimension, and the one after the last."""
    return start // size, -(-stop // size)


def dequantised(part: Tensor, scales: Tensor, block: Block, *, dim: int, start: int) -> Tensor:
    """The numbers that a part of an fp8 tensor stands for, in float32.

    Args:
        part: [rows, columns] the part, which begins at `start` along `dim` and is whole along the other dimension.
        scales: Those of the blocks that the part touches.
        block: Rows and columns of a block.
        dim: The dimension along which it is a part.
        start: The first entry along `dim`.
    """
    rows, columns = block
    above, left = (start % rows, 0) if dim == 0 else (0, start % columns)
    of_columns = scales.float().repeat_interleave(columns, 1)[:, left : left + part.shape[1]]
    result = part.float()
    for number, scale in enumerate(of_columns):  # one row of blocks at a time: no second matrix of this size
        result[max(0, number * rows - above) : (number + 1) * rows - above] *= scale
    return result
