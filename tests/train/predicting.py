"""Multi-token prediction in plain torch, after equations 21 to 25 of the report on DeepSeek-V3 (2024).

The decoder layers are those of transformers; it has nothing else of it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.support.tiny_models import transformers_model
from torch import Tensor, nn

from slime.rollout.train_batch import TrainBatch


@dataclass
class Prediction:
    """A step of the layers, by the names of the model folder.

    Attributes:
        loss: The mean cross-entropy of a trained token before the step, over all layers.
        weights: Their weights after the step.
    """

    loss: float
    weights: dict[str, Tensor]


def reference_step(folder: Path, work: Path, batch: TrainBatch, *, lr: float, eps: float, scale: float) -> Prediction:
    """One step of AdamW, without weight decay, with the mean loss of the trained tokens."""
    config = json.loads((folder / "config.json").read_text())
    first, count = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    model = transformers_model(folder)
    longer = _with_more_layers(folder, work, config | {"num_hidden_layers": first + count})
    files = load_file(folder / "model.safetensors")
    own = {
        name: nn.Parameter(files[name].clone())
        for number in range(first, first + count)
        for name in (
            f"model.layers.{number}.{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        )
    }
    layers = [longer.model.layers[number] for number in range(first, first + count)]
    trained = [*own.values(), *(parameter for layer in layers for parameter in layer.parameters())]
    optimizer = torch.optim.AdamW(trained, lr=lr, eps=eps, weight_decay=0.0)

    def norm(x: Tensor, name: str) -> Tensor:
        scale: Tensor = (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt()
        return x * scale * own[name]

    total, tokens = torch.zeros(()), 0.0
    for sample, response, mask in zip(batch.tokens, batch.response_lengths, batch.loss_masks, strict=True):
        ids = torch.from_numpy(sample).long()
        with torch.no_grad():
            states = model.model(ids[None]).last_hidden_state
        tokens += float(mask.sum())
        trains = torch.cat([torch.zeros(len(ids) - int(response)), torch.from_numpy(mask)])
        for k, layer in enumerate(layers, start=1):
            prefix, length = f"model.layers.{first + k - 1}", len(ids) - k
            # (21) h'_i = M [norm(h_i); norm(Emb(t_{i+k}))], where published weights have the embedding first
            embedded = model.model.embed_tokens(ids[k:]).detach()
            both = norm(embedded, f"{prefix}.enorm.weight"), norm(states[0, :length], f"{prefix}.hnorm.weight")
            joined = F.linear(torch.cat(both, dim=-1), own[f"{prefix}.eh_proj.weight"])[None]
            # (22) h_i = TRM(h'_i)
            at = torch.arange(length)[None]
            unseen = torch.full((length, length), -torch.inf).triu(1)[None, None]
            angles = longer.model.rotary_emb(joined, at)
            states = norm(
                layer(joined, attention_mask=unseen, position_ids=at, position_embeddings=angles),
                f"{prefix}.shared_head.norm.weight",
            )
            # (23, 24) the cross-entropy of t_{i+k+1}
            scores = F.linear(states[0, : length - 1], model.lm_head.weight.detach()).log_softmax(-1)
            targets = ids[k + 1 :]
            total = total - (scores.gather(-1, targets[:, None])[:, 0] * trains[k + 1 :]).sum()
    # (25) the mean over the layers, with a factor
    loss = total / tokens / count
    torch.autograd.backward(scale * loss)
    optimizer.step()
    longer.save_pretrained(work / "stepped")
    stepped = load_file(work / "stepped" / "model.safetensors")
    prefixes = tuple(f"model.layers.{number}." for number in range(first, first + count))
    weights = {name: tensor for name, tensor in stepped.items() if name.startswith(prefixes)}
    return Prediction(loss.item(), weights | {name: parameter.detach() for name, parameter in own.items()})


def _with_more_layers(folder: Path, work: Path, config: dict[str, Any]) -> Any:
    """The model of a folder as if its layers for multi-token prediction were layers of the model."""
    work.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / "model.safetensors", work / "model.safetensors")
    (work / "config.json").write_text(json.dumps(config))
    return transformers_model(work)
