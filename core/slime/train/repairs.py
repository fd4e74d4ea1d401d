"""Defects of megatron-core 0.16.1 without TransformerEngine, on any device."""

from __future__ import annotations

import contextlib
import importlib.util
import types
from typing import Any

from megatron.core.tensor_parallel import random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils


def repair_without_transformer_engine() -> None:
    """Make experts, latent attention and recomputation run where TransformerEngine is not installed."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    modules: list[Any] = [random, multi_latent_attention, moe_utils]
    recomputation, attention, routers = modules
    # Recomputing norms and up projections asks TransformerEngine about FP8.
    recomputation.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
    recomputation.activation_recompute_forward = recomputation.fp8_autocast = lambda **_: contextlib.nullcontext()
    # It is True without TransformerEngine.
    attention.HAVE_TE = False
    # Every router reads this name, which is bound only with TransformerEngine.
    routers.__dict__.setdefault("te_general_gemm", None)
