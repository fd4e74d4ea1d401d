"""Hugging Face ↔ Megatron: what a model is, its tensors in both directions, and their way to the engines.

`architecture` reads a `config.json`; `load_hf` fills Megatron shards from safetensors; `named_hf_tensors`
gives them back, full and under their Hugging Face names, on rank 0; `save_hf` writes a model folder;
`create_transport` makes what carries them to live engines.  Only `architecture` and `read_hf_config` work
without torch, which is why names resolve on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.weights.architectures import Architecture, architecture, read_hf_config
    from slime.weights.export import named_hf_tensors
    from slime.weights.load import load_hf, load_hf_backbone
    from slime.weights.save import save_hf
    from slime.weights.transports.create import create_transport
    from slime.weights.verify import WeightCheck

__all__ = [
    "Architecture",
    "WeightCheck",
    "architecture",
    "create_transport",
    "load_hf",
    "load_hf_backbone",
    "named_hf_tensors",
    "read_hf_config",
    "save_hf",
]

_HOME = {
    "Architecture": "slime.weights.architectures",
    "WeightCheck": "slime.weights.verify",
    "architecture": "slime.weights.architectures",
    "create_transport": "slime.weights.transports.create",
    "load_hf": "slime.weights.load",
    "load_hf_backbone": "slime.weights.load",
    "named_hf_tensors": "slime.weights.export",
    "read_hf_config": "slime.weights.architectures",
    "save_hf": "slime.weights.save",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
