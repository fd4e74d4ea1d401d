"""Megatron's log-probs equal those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_folders import Folders
from tests.train.harness import Centred, RankLauncher, make_batch, make_config, run_ranks

from slime.rollout.train_batch import TrainBatch

LAYOUTS = {
    "one rank": (1, {}),
    "tensor 2": (2, {"tensor_model_parallel_size": 2}),
    "pipeline 2": (2, {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 2}),
}


def log_probs(launcher: RankLauncher, config: Any, batch: TrainBatch) -> list[np.ndarray[Any, Any]]:
    rank = launcher.start(config, Centred())
    values: list[np.ndarray[Any, Any]] = rank.log_probs(batch)
    rank.close()
    return values


def transformers_log_probs(folder: Path, batch: TrainBatch, temperature: float) -> list[np.ndarray[Any, Any]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    expected = []
    for tokens, response in zip(batch.tokens, batch.response_lengths, strict=True):
        ids = torch.from_numpy(tokens).long()
        with torch.no_grad():
            scores = (model(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        expected.append(scores.gather(-1, ids[1:, None]).squeeze(-1)[-int(response) :].numpy())
    return expected


@pytest.mark.engine
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("llama", False), ("llama31", True)])
def test_log_probs_equal_transformers(family: str, tied: bool, layout: str, model_folder: Folders) -> None:
    folder = model_folder(family, tied=tied)
    batch = make_batch(samples=7, response=(1, 40))
    world_size, sizes = LAYOUTS[layout]
    config = make_config(folder, world_size=world_size, megatron=sizes, rollout_temperature=0.7, max_tokens_per_gpu=64)
    expected = transformers_log_probs(folder, batch, 0.7)
    for values in run_ranks(log_probs, world_size, config, batch):
        assert max(np.abs(a - b).max() for a, b in zip(values, expected, strict=True)) < 1e-4
