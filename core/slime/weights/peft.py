"""Adapters from and into folders in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from slime.errors import CheckpointError, disk_problem
from slime.weights.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from slime.weights.shards import NamedTensors, ReadSlice

#: the folder of the adapters inside an exported model; beside config.json transformers would add them a second time
ADAPTER_FOLDER = "adapter"


def peft_reader(folder: Path) -> ReadSlice:
    """Reads slices of the tensors of a PEFT folder, which `slime.weights.lora` has checked."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / ADAPTER_WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    return lambda name, dim, start, stop: tensors[name].narrow(dim, start, stop - start)


def peft_writer(named: NamedTensors, config: dict[str, Any]) -> Callable[[Path], None]:
    """What writes the adapters and their `adapter_config.json` into a model folder, as its folder `adapter`."""

    def write(model_folder: Path) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        folder = model_folder / ADAPTER_FOLDER
        folder.mkdir()
        tensors: dict[str, Tensor] = {name: tensor.cpu().clone().contiguous() for name, tensor in named}
        text = json.dumps(config, indent=2) + "\n"
        (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
        try:
            save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise CheckpointError(
                f"{folder / ADAPTER_WEIGHTS} cannot be written: {disk_problem(error, folder)}."
            ) from error

    return write
