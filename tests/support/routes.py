"""The experts that transformers chooses for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def transformers_routes(model: Any, tokens: Sequence[int]) -> NDArray[np.integer[Any]]:
    """[tokens, layers, experts per token], sorted; zeros in layers without experts."""
    config = model.config
    routes = np.zeros((len(tokens), config.num_hidden_layers, config.num_experts_per_tok), dtype=np.int64)
    hooks = [
        layer.mlp.gate.register_forward_hook(_keep(routes, number))
        for number, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    with torch.no_grad():
        model(torch.tensor([list(tokens)]))
    for hook in hooks:
        hook.remove()
    return np.sort(routes, -1)


def _keep(routes: NDArray[np.integer[Any]], layer: int) -> Any:
    def hook(_module: object, _arguments: object, outputs: tuple[torch.Tensor, ...]) -> None:
        [chosen] = [output for output in outputs if not output.is_floating_point()]
        routes[:, layer] = chosen.view(routes.shape[0], -1).numpy()

    return hook
