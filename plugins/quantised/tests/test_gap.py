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


def _sent_by_two_ranks(_: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    from slime_quantised.gap import with_dequantized_weights

    model = read_architecture(folder)
    chunks = build(folder, ep=torch.distributed.get_world_size())
    load_hf(chunks, folder, model)
    sent = {name: _bits(tensor.clone()) for name, tensor in Fp8(model).tensors(named_hf_tensors(chunks, model))}
    with with_dequantized_weights(chunks, Fp8(model).rules):
        inside = {name: tensor.clone() for name, tensor in named_hf_tensors(chunks, model)}
    return inside, sent


def _bits(tensor: Tensor) -> Tensor:
    """Numbers of 8 bits as bytes, which can be pickled."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


@pytest.mark.engine
def test_experts_that_ranks_divide_are_quantised_as_those_of_one_rank(model_folder: Folders) -> None:
    folder = model_folder("qwen3_moe", seed=1, hidden_size=192, moe_intermediate_size=160, head_dim=48)
    (inside, sent), (elsewhere, nothing) = run_ranks(_sent_by_two_ranks, 2, folder)
    stored = load_file(folder / "model.safetensors")
    assert elsewhere == nothing == {} and inside.keys() == stored.keys()
    one = {name: _bits(tensor) for name, tensor in Fp8(read_architecture(folder)).tensors(iter(stored.items()))}
    assert sent.keys() == one.keys() and all(torch.equal(sent[name], one[name]) for name in one)
    experts = [name for name in stored if ".experts." in name]
    assert len(experts) == 3 * 8 * 3
    assert all(torch.equal(inside[name], fp8_reference.dequantised(stored[name])) for name in experts)
    assert all(f"{name}_scale_inv" in sent and sent[name].dtype == torch.uint8 for name in experts)
