"""What a folder's files say about its tensors, compared with models that transformers wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.model_folders import Folders

from slime.weights import architecture, read_hf_config
from slime.weights.mapping import tensor_shapes
from slime.weights.stored import not_finite, stored_tensors


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama31", True), ("qwen3", False), ("qwen3", True)])
def test_shapes_are_those_that_transformers_writes(model_folder: Folders, family: str, tied: bool) -> None:
    # An odd feed-forward size and an odd vocabulary, so that no two sizes are equal by chance.
    folder = model_folder(family, tied=tied, intermediate_size=88, vocab_size=130)
    stored = stored_tensors(folder)
    assert {name: tensor.shape for name, tensor in stored.items()} == tensor_shapes(
        architecture(read_hf_config(folder))
    )
    assert {tensor.dtype for tensor in stored.values()} == {"F32"}
    assert list(not_finite(stored, everything=True)) == []


@pytest.mark.parametrize("everything", [True, False])
def test_only_the_tensor_that_has_a_number_that_is_not_finite_is_named(tmp_path: Path, everything: bool) -> None:
    wrong = torch.ones(8)
    wrong[3] = float("nan")
    tensors = {"before": torch.ones(8), "middle": wrong, "next": torch.ones(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert list(not_finite(stored_tensors(tmp_path), everything=everything)) == ["middle"]
