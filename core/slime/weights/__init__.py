"""Hugging Face and Megatron weights, and their transport to the engines.

`Models` turns a `config.json` into what Megatron builds. `load_hf` fills Megatron shards from safetensors,
`named_hf_tensors` gathers them back under their Hugging Face names, and `save_hf` writes them to a model folder.
`create_transport` sends them to live engines.

`Models` and `read_hf_config` work without torch, so these names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.weights.hf_config import read_hf_config as read_hf_config
    from slime.weights.hf_load import load_hf as load_hf
    from slime.weights.hf_load import load_hf_backbone as load_hf_backbone
    from slime.weights.hf_save import save_hf as save_hf
    from slime.weights.models import Models as Models
    from slime.weights.shards import drain as drain
    from slime.weights.shards import named_hf_tensors as named_hf_tensors
    from slime.weights.transports import create_transport as create_transport

_MODULE = {
    "Models": "models",
    "create_transport": "transports",
    "drain": "shards",
    "load_hf": "hf_load",
    "load_hf_backbone": "hf_load",
    "named_hf_tensors": "shards",
    "read_hf_config": "hf_config",
    "save_hf": "hf_save",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE[name]}"), name)
