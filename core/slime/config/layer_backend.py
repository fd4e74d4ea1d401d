"""What computes the trainer's layers, and what each choice needs of the machine; torch is not imported to find out."""

from __future__ import annotations

import importlib.util
from typing import Literal

from slime.shops import import_shop

LayerBackend = Literal["fused", "te", "torch"]

#: Megatron's words for two of them (--transformer-impl)
MEGATRONS_WORDS: dict[str, LayerBackend] = {"transformer_engine": "te", "local": "torch"}


def choose_layers(*, on_gpu: bool, adapters: bool) -> LayerBackend:
    """The choice of a run that states none. Never `fused`: on a CPU it is slow to compile, on a GPU it is unproven.

    Args:
        on_gpu: Whether the run is on NVIDIA devices.
        adapters: Whether it trains adapters.
    """
    return "te" if not adapters and missing_for("te", on_gpu=on_gpu) is None else "torch"


def missing_for(layers: str, *, on_gpu: bool) -> str | None:
    """What a choice lacks on this machine, to be read after its flag; None if nothing.

    Args:
        layers: The choice.
        on_gpu: Whether the run is on NVIDIA devices.
    """
    if layers == "te" and not on_gpu:
        return "needs a GPU, and this run is on CPU (--device). Drop it"
    if layers == "te" and importlib.util.find_spec("transformer_engine") is None:
        return (
            "needs the package transformer_engine, which is not installed. Drop it, or build TransformerEngine for this"
            " PyTorch: no release of it has a wheel"
        )
    if layers != "fused":
        return None
    if importlib.util.find_spec("slime_fused") is None:
        return "needs the package slime_fused, which is not installed. Install slime-rl again, with all of its packages"
    lacks: str | None = import_shop("slime_fused", "--layer-backend fused").missing(on_gpu=on_gpu)
    return lacks
