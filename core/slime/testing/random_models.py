"""Small Hugging Face model folders with random weights, made and computed by transformers.

Weights are larger than those a model starts training with, and norms and biases are random too, so that a tensor in the
wrong place changes the outputs by far more than rounding does.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: standard deviation of weights, unless `config.json` states one
_SPREAD = 0.06


def write_random_model(
    folder: Path, config: Mapping[str, Any], *, seed: int = 0, model_class: str | type | None = None
) -> Path:
    """Write a model in float32: `config.json` as given, and `model.safetensors`. No tokenizer.

    Args:
        folder: Where to; made if it does not exist.
        config: Content of `config.json`. What it leaves out has the default of the class.
        seed: Of the weights.
        model_class: The class of transformers that computes the model, or its name; default: the one in
            `architectures`.

    Returns:
        The folder.

    Raises:
        ValueError: transformers has no such class.
    """
    import torch

    found = _class_of(config, model_class)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = found(_config_of(found, {"initializer_range": _SPREAD, **config})).float()
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if "norm" in name or name.endswith("e_score_correction_bias"):
                    tensor.add_(torch.randn_like(tensor) * 0.1)
                elif name.endswith("bias"):
                    tensor.add_(torch.randn_like(tensor) * 0.02)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return folder


def transformers_model(folder: Path, model_class: str | type | None = None) -> Any:
    """The model in `folder` as transformers computes it, in float32 and without dropout.

    Args:
        folder: A Hugging Face model folder.
        model_class: As of `write_random_model`.
    """
    import torch

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = _class_of(config, model_class)
    return found.from_pretrained(
        folder, config=_config_of(found, config), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _class_of(config: Mapping[str, Any], model_class: str | type | None) -> Any:
    if isinstance(model_class, type):
        return model_class
    import transformers

    name = model_class or (config.get("architectures") or ["(config.json has no architectures)"])[0]
    found = getattr(transformers, str(name), None)
    if found is None:
        raise ValueError(
            f"transformers {transformers.__version__} has no class {name}; pass model_class, the name of the class"
            " that computes the same, or a class of your own in the form of those of transformers"
        )
    return found


def _config_of(model_class: Any, config: Mapping[str, Any]) -> Any:
    """The configuration object. `model_type` may be one that transformers does not know."""
    # a copy: transformers writes into the tables that it is given, such as rope_scaling
    return model_class.config_class(
        **copy.deepcopy({key: value for key, value in config.items() if key != "model_type"})
    )
