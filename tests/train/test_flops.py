"""What a sequence costs equals what a counter sees in transformers' forward pass."""

from __future__ import annotations

import pytest
import torch
from tests.support.model_folders import Folders
from tests.support.tiny_models import transformers_model
from tests.train.harness import make_config
from torch.utils.flop_counter import FlopCounterMode

from slime.train.micro_batches import Flops
from slime.train.settings import train_settings
from slime.weights.models import Models

TOKENS = 24


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "deepseek_v3", "moonlight"])
def test_operations_are_those_of_transformers(family: str, model_folder: Folders) -> None:
    folder = model_folder(family)
    found = Models.installed(make_config(folder)).read(folder)
    settings = train_settings(make_config(folder), found)
    flops = Flops.of(settings.transformer, vocab_size=settings.vocab_size)
    model = transformers_model(folder)
    model.set_experts_implementation("eager")  # the counter does not know grouped products
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(TOKENS)[None])
    # Transformers computes every pair and masks half of them.
    every_pair = (flops.per_token + flops.per_prediction) * TOKENS + flops.per_pair * TOKENS**2
    assert counter.get_total_flops() == pytest.approx(every_pair, rel=0.01)
    assert flops(TOKENS, TOKENS) == every_pair - flops.per_pair * TOKENS * (TOKENS - 1) / 2
    assert flops(TOKENS, 5) == flops(TOKENS, TOKENS) - flops.per_prediction * (TOKENS - 5)
