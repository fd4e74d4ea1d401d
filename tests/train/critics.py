"""Helpers for tests of the critic: an estimator that needs one, and access to its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.train.harness import RankLauncher, make_config

from slime.plugin import Advantages, EstimatorBatch, EstimatorSpec

SPEC = EstimatorSpec(name="gae", factory="none:None", needs=frozenset({"critic"}))


class Gae:
    """Generalised advantage estimation without discount; the reward arrives with the last token."""

    def __init__(self, lam: float = 1.0) -> None:
        self.lam = lam

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        assert batch.values is not None
        advantages, returns = [], []
        for reward, mask, values in zip(batch.rewards, batch.loss_masks, batch.values, strict=True):
            ahead = torch.cat([values[1:], values.new_zeros(1)])
            deltas = ahead - values
            deltas[-1] += reward
            gains, gain = torch.zeros_like(values), torch.zeros(())
            for t in reversed(range(values.numel())):
                gain = deltas[t] + self.lam * gain
                gains[t] = gain
            advantages.append(gains * mask)
            returns.append(gains + values)
        return Advantages(advantages, returns)


def start(launcher: RankLauncher, config: Any, head: torch.Tensor | None = None) -> Any:
    """A rank with a critic, whose head is `head` [1, H] where one is given."""
    rank = launcher.start(config, Gae(), SPEC)
    if head is not None:
        with torch.no_grad():
            for module in heads(rank):
                module.weight.copy_(head)
        rank.critic.model.optimizer.reload_model_params()
    return rank


def heads(rank: Any) -> list[Any]:
    """The value head, on ranks of the last stage."""
    return [chunk.output_layer for chunk in rank.critic.model.chunks if chunk.post_process]


def backbone(rank: Any) -> dict[str, torch.Tensor]:
    """The critic's full weights under Hugging Face names, on rank 0; of a tied model, so that no head is among them."""
    from tests.support.families import read_architecture

    from slime.weights.shards import named_hf_tensors

    rank.critic.model.finish_param_gather()
    named = named_hf_tensors(rank.critic.model.chunks, read_architecture(Path(rank.config.checkpoint.hf_checkpoint)))
    return {name: tensor.clone() for name, tensor in named}


def head_of(rank: Any) -> torch.Tensor | None:
    """The head's weight [1, H] where this rank has it."""
    return next((module.weight.detach().clone() for module in heads(rank)), None)


def random_head(hidden: int = 64, seed: int = 5) -> torch.Tensor:
    return torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed)) * 0.2


def transformers_backbone(folder: Path) -> Any:
    """An independent implementation of the transformer, without output layer."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def transformers_values(model: Any, head: torch.Tensor, batch: Any) -> list[torch.Tensor]:
    """N x [T_i]: the head over the hidden state at the position before each response token, differentiable."""
    found = []
    for tokens, response in zip(batch.tokens, batch.response_lengths, strict=True):
        hidden = model(torch.from_numpy(tokens).long()[None]).last_hidden_state[0]
        before = np.arange(len(tokens) - int(response), len(tokens)) - 1
        found.append((hidden @ head[0])[before])
    return found


def critic_config(folder: Path, world_size: int = 1, sizes: dict[str, Any] | None = None, **options: Any) -> Any:
    megatron = {**(sizes or {}), **options.pop("megatron", {})}
    return make_config(folder, world_size=world_size, megatron=megatron, **options)
