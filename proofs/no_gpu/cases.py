"""The models and layouts that are traced: published shapes with few layers, one of their ranks each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import slime_planner
from slime.config import RunConfig, read_config
from slime.config.defaults import resolve

_CONFIGS = Path(slime_planner.__file__).parent / "models"


@dataclass(frozen=True)
class Case:
    """One rank's step."""

    #: of the script in scripts/models
    model: str
    #: ranks in all, and which of them
    ranks: int = 1
    rank: int = 0
    #: flags of the run
    flags: str = ""
    layers: int = 4
    #: in a full micro-batch
    tokens: int = 8192
    #: data-parallel copies
    copies: int = 1
    #: what config.json has in place of the published numbers
    shape: Mapping[str, int] = field(default_factory=dict)


#: the part that takes colocation's turns, and the device's memory in it
TURNS, TURNS_MIB = "turns", 1000
CASES = {
    "dense": Case("qwen2.5-1.5B"),
    "dense, fused": Case("qwen2.5-1.5B", flags="--layer-backend fused"),
    "dense, recomputed": Case(
        "qwen3-8B", flags="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "dense, tensor 2 with sequence": Case("qwen3-8B", 2, 1, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "dense, context 2": Case("qwen3-8B", 2, 1, "--context-parallel-size 2"),
    "dense, pipeline 2, first": Case("llama3.1-8B", 2, 0, "--pipeline-model-parallel-size 2"),
    "dense, pipeline 2, last": Case("llama3.1-8B", 2, 1, "--pipeline-model-parallel-size 2"),
    "dense, data 2": Case("qwen3-4B", 2, 1, copies=2),
    "post norms": Case("glm4-9B"),
    "experts": Case("qwen3-30B-A3B", layers=2),
    "experts, expert 8": Case("qwen3-30B-A3B", 8, 3, "--expert-model-parallel-size 8", copies=8),
    "latent attention, expert 8": Case("moonlight-16B-A3B", 8, 3, "--expert-model-parallel-size 8", copies=8),
    "reference": Case("qwen2.5-1.5B", flags="--use-kl-loss --kl-loss-coef 0.1 --num-steps-per-rollout 2"),
    "adapters": Case("qwen2.5-1.5B", flags="--lora-rank 16"),
}
#: the parts that compile flash-attn-4: for heads of 64 and 128, of which a head of keys serves seven, six and four
ATTENTION = {f"attention, {model}": model for model in ("qwen2.5-0.5B", "qwen2.5-1.5B", "qwen3-8B")}


def published(model: str) -> dict[str, Any]:
    """What a model's config.json has."""
    read: dict[str, Any] = json.loads((_CONFIGS / f"{model}.json").read_text(encoding="utf-8"))
    return read


def config_of(case: Case, folder: Path) -> tuple[RunConfig, Path]:
    """The run of a case, and its model folder."""
    model = folder / "model"
    model.mkdir()
    config = published(case.model) | {"num_hidden_layers": case.layers, **case.shape}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    flags = [
        *("--device", "cuda", "--bf16", "--hf-checkpoint", str(model), "--max-tokens-per-gpu", str(case.tokens)),
        *(
            "--actor-num-gpus-per-node",
            str(case.ranks),
            "--rollout-batch-size",
            str(2 * case.copies),
            "--n-samples-per-prompt",
            "4",
        ),
        *("--rollout-max-response-len", "201"),
        *case.flags.split(),
    ]
    return resolve(read_config(flags)), model
