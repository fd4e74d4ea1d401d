"""Tiny models in fp8 with one scale for each block, as DeepSeek publishes them, and what they stand for.

Written without slime's code: the blocks are gone through one by one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_LARGEST = 448.0  # of float8_e4m3fn


def quantised_copy(source: Path, folder: Path, *, block: tuple[int, int] = (128, 128)) -> dict[str, Tensor]:
    """Write `source` with its projections in fp8 to `folder`; returns all weights as they should be read, in float32.

    As in the published folders, embeddings, the output layer, norms, biases and routers are not quantised.
    """
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }
    (folder / "config.json").write_text(json.dumps(config))
    stored: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight") or "kv_a_proj_with_mqa" in name:
            stored[name], stored[f"{name}_scale_inv"], expected[name] = _quantised(tensor, block)
        else:
            stored[name] = tensor.bfloat16() if "norm" not in name else tensor
            expected[name] = stored[name].float()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return expected


def _quantised(tensor: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, scales, and their products."""
    rows, columns = tensor.shape
    numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    expected = torch.empty(rows, columns)
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = tensor[place].abs().max() / _LARGEST
            numbers[place] = (tensor[place] / scales[i, j]).to(torch.float8_e4m3fn)
            expected[place] = numbers[place].float() * scales[i, j]
    return numbers, scales, expected
