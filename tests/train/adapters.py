"""Adapters by hand for tests: PEFT's formula on a transformers model, and PEFT folders with random values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slime.rollout.train_batch import TrainBatch

RANK, ALPHA = 4, 6.0


def write_adapter(folder: Path, model_folder: Path, targets: list[str], **config: Any) -> Path:
    """A PEFT folder with random A and B for the modules whose names end with one of `targets`."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, weight in transformers_model(model_folder).named_parameters():
        module = name.removesuffix(".weight")
        if any(module.endswith(f".{target}") for target in targets):
            rows, columns = weight.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) * 0.1
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) * 0.1
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": targets,
        "base_model_name_or_path": str(model_folder),
        "lora_dropout": 0.0,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described | config))
    return folder


def transformers_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model.requires_grad_(False)


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of a PEFT folder, with gradients."""
    from safetensors.torch import load_file

    return {name: value.requires_grad_() for name, value in load_file(folder / "adapter_model.safetensors").items()}


def modules_of(tensors: dict[str, Tensor]) -> list[str]:
    return [
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        for name in tensors
        if name.endswith("lora_A.weight")
    ]


@contextmanager
def adapted(model: Any, tensors: dict[str, Tensor], scale: float = ALPHA / RANK) -> Iterator[None]:
    """In the body, each module computes W x + scale B A x."""
    hooks = []
    for module in modules_of(tensors):
        a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")

        def add(_: Any, inputs: Any, output: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
            return output + scale * (inputs[0] @ a.T @ b.T)

        hooks.append(model.get_submodule(module).register_forward_hook(add))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def merged(model: Any, tensors: dict[str, Tensor], scale: float = ALPHA / RANK) -> dict[str, Tensor]:
    """The weights W + scale B A, by name."""
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for module in modules_of(tensors):
        a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"].detach() for part in "AB")
        weights[f"{module}.weight"] += scale * b @ a
    return weights


def log_probs(model: Any, batch: TrainBatch) -> list[Tensor]:
    """Of the response tokens, as [T_i] for each sample."""
    found = []
    for tokens, response in zip(batch.tokens, batch.response_lengths, strict=True):
        ids = torch.from_numpy(tokens).long()
        scores = model(ids[None]).logits[0, :-1].log_softmax(-1)
        found.append(scores.gather(-1, ids[1:, None]).squeeze(-1)[-int(response) :])
    return found


def supervised_loss(model: Any, batch: TrainBatch) -> Tensor:
    """Mean over the trained tokens of minus the log-prob."""
    masks = [torch.from_numpy(mask) for mask in batch.loss_masks]
    total = torch.stack([(part * mask).sum() for part, mask in zip(log_probs(model, batch), masks, strict=True)]).sum()
    return -total / torch.stack([mask.sum() for mask in masks]).sum()
