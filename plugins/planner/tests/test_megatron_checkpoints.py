"""A new run takes its first weights from a checkpoint that Megatron-core saved as Megatron-LM does."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from tests.train.harness import RankLauncher, make_config, run_ranks
from torch import Tensor

from slime.errors import CheckpointError
from slime.run.checkpoint.read import initial_part, megatron_part
from slime_planner.checkpoint_weights import CheckpointWeights

#: rows of the vocabulary in the checkpoint: Megatron-LM pads to a multiple of 128
ROWS = 256


def save_as_megatron(launcher: RankLauncher, config: Any, root: Path, by_layer: bool) -> None:
    """A GPTModel of Megatron's stock layers with random weights, saved as the fifth iteration."""
    rank = launcher.start(config)
    # On a CPU, Megatron can be imported once the platform is there.
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    own = rank.policy.chunks[0]
    known = {one.name for one in fields(TransformerConfig) if one.init}
    plain = (bool, int, float, str, list, torch.dtype, FunctionType)  # no process groups
    sizes = {name: value for name, value in vars(own.config).items() if name in known and isinstance(value, plain)}
    torch.manual_seed(3)
    experts = {"num_experts": own.config.num_moe_experts, "moe_grouped_gemm": False}
    model = GPTModel(
        config=TransformerConfig(**sizes),
        transformer_layer_spec=get_gpt_layer_local_spec(
            **experts, qk_layernorm=own.config.qk_layernorm, normalization=own.config.normalization
        ),
        vocab_size=ROWS,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=own.share_embeddings_and_output_weights,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    folder = root / "iter_0000005"
    folder.mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    sharded = model.sharded_state_dict(metadata={"non_homogeneous_layers": by_layer})
    state = {"model": sharded, "iteration": 5, "args": argparse.Namespace(num_layers=2), "checkpoint_version": 3.0}
    dist_checkpointing.save(state, str(folder))
    rank.close()


def first_weights(launcher: RankLauncher, config: Any, folder: Path) -> dict[str, Tensor]:
    """What a run has after `--initial-megatron-checkpoint`."""
    rank = launcher.start(config)
    rank.load(initial_part(folder), weights_only=True)
    found = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    rank.close()
    return found


TP = {"tensor_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "tied", "by_layer", "ranks", "layout"),
    [
        pytest.param("qwen3", True, False, 1, {}, id="dense, layers stacked"),
        pytest.param("llama", False, True, 2, TP, id="dense, a tensor for each layer", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", False, False, 2, EP, id="experts", marks=pytest.mark.slow),
    ],
)
def test_the_weights_are_those_that_megatron_saved(
    family: str, tied: bool, by_layer: bool, ranks: int, layout: Any, model_folder: Folders, tmp_path: Path
) -> None:
    folder, root = model_folder(family, tied=tied), tmp_path / "megatron"
    options = {"loss_type": "sft_loss"}
    run_ranks(save_as_megatron, 1, make_config(folder, **options), root, by_layer)
    table = CheckpointWeights(initial_part(root), read_architecture(folder))
    expected = {name: table.read(name) for name in table.shapes}
    config = make_config(folder, world_size=ranks, megatron=layout, **options)
    loaded = run_ranks(first_weights, ranks, config, root)[0]
    assert loaded.keys() == expected.keys()
    assert all(loaded[name].equal(tensor[: len(loaded[name])]) for name, tensor in expected.items())
    assert all(tensor.std() > 0.5 for tensor in loaded.values())  # the random ones, not the folder's
    other = read_architecture(model_folder("llama" if family == "qwen3" else "qwen3", tied=tied))
    with pytest.raises(CheckpointError, match="holds another model than the one described"):
        CheckpointWeights(initial_part(root), other)


def test_other_formats_and_damaged_folders_of_megatron_are_named(tmp_path: Path) -> None:
    pointer, iteration = tmp_path / "latest_checkpointed_iteration.txt", tmp_path / "iter_0000007"
    assert megatron_part(tmp_path) is None
    pointer.write_text("seven")
    with pytest.raises(CheckpointError, match="is damaged: got 'seven', expected `release` or the number"):
        megatron_part(tmp_path)
    pointer.write_text("7\n")
    with pytest.raises(CheckpointError, match="names iter_0000007, which is not there"):
        megatron_part(tmp_path)
    (iteration / "mp_rank_00").mkdir(parents=True)
    for place in (tmp_path, iteration):
        with pytest.raises(CheckpointError, match=r"in the format 'torch', expected 'torch_dist'\. Save it"):
            megatron_part(place)
    (iteration / "metadata.json").write_text(json.dumps({"sharded_backend": "fsdp_dtensor"}))
    with pytest.raises(CheckpointError, match="in the format 'fsdp_dtensor'"):
        megatron_part(tmp_path)
    (iteration / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    assert megatron_part(tmp_path) == megatron_part(iteration) == iteration
