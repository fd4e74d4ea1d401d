"""The trainer computes with what quantised weights stand for, whatever part of them each rank has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support import fp8_reference
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from tests.weights.megatron_ranks import build, run_ranks
from torch import Tensor

from slime.weights.hf_load import load_hf
from slime.weights.shards import named_hf_tensors
from slime_quantised.fp8 import Fp8


def _inside_and_after(_: int, folder: Path) -> list[dict[str, Tensor]]:
    from slime_quantised.gap import with_dequantized_weights

    model = read_architecture(folder)
    chunks = build(folder, tp=torch.distributed.get_world_size())
    load_hf(chunks, folder, model)
    gathered = []
    with with_dequantized_weights(chunks, Fp8(model).rules):
        gathered.append({name: tensor.clone() for name, tensor in named_hf_tensors(chunks, model)})
    gathered.append({name: tensor.clone() for name, tensor in named_hf_tensors(chunks, model)})
    return gathered


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_holds_what_a_quantiser_in_float64_says_and_its_own_weights_afterwards(
    ranks: int, model_folder: Folders
) -> None:
    # With these sizes two ranks share blocks, along rows and along columns.
    folder = model_folder("qwen3", seed=1, hidden_size=192, intermediate_size=160, head_dim=48)
    inside, after = run_ranks(_inside_and_after, ranks, folder)[0]
    stored, quantised = load_file(folder / "model.safetensors"), 0
    for name, tensor in after.items():
        assert torch.equal(tensor, stored[name]), name
        if name.endswith("_proj.weight"):
            assert torch.equal(inside[name], fp8_reference.dequantised(stored[name])), name
            quantised += 1
        else:
            assert torch.equal(inside[name], stored[name]), name
    assert quantised > 10
