"""What a folder's files say about its tensors, compared with models that transformers wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tests.support.families import read_architecture
from tests.support.model_folders import Folders

from slime.errors import CheckpointError
from slime.weights.stored import not_finite, stored_tensors


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama31", True), ("qwen3", False), ("qwen3", True)])
def test_shapes_are_those_that_transformers_writes(model_folder: Folders, family: str, tied: bool) -> None:
    # An odd feed-forward size and an odd vocabulary, so that no two sizes are equal by chance.
    folder = model_folder(family, tied=tied, intermediate_size=88, vocab_size=130)
    stored = stored_tensors(folder)
    assert {name: tensor.shape for name, tensor in stored.items()} == read_architecture(folder).shapes
    assert {tensor.dtype for tensor in stored.values()} == {"F32"}
    assert list(not_finite(stored, everything=True)) == []


@pytest.mark.parametrize("everything", [True, False])
def test_only_the_tensor_that_has_a_number_that_is_not_finite_is_named(tmp_path: Path, everything: bool) -> None:
    wrong = torch.ones(8)
    wrong[3] = float("nan")
    tensors = {"before": torch.ones(8), "middle": wrong, "next": torch.ones(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert list(not_finite(stored_tensors(tmp_path), everything=everything)) == ["middle"]


def write(folder: Path, shape: list[int], offsets: list[int], *, dtype: str = "F32", size: int = 16) -> None:
    """A file with one tensor, as its header describes it, and `size` bytes."""
    header = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


@pytest.mark.parametrize(
    ("shape", "offsets"), [([4], [0, 12]), ([-2, -2], [0, 16]), ([4], [16, 0]), ([8], [-16, 16]), ([5], [0, 16])]
)
def test_a_header_that_contradicts_itself_is_refused(shape: list[int], offsets: list[int], tmp_path: Path) -> None:
    write(tmp_path, shape, offsets)
    with pytest.raises(CheckpointError, match="damaged header"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([0, 8], [8, 16], None),
        ([8, 16], [0, 8], None),  # the order of the header is not that of the bytes
        ([0, 8], [4, 12], "overlaps the tensor before it"),
        ([0, 16], [0, 16], "overlaps the tensor before it"),
        ([0, 8], [12, 20], "leaves a gap before it"),
        ([4, 12], [12, 20], "leaves a gap before it"),
    ],
)
def test_tensors_follow_each_other_as_safetensors_demands(
    first: list[int], second: list[int], said: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    spans = {"a": first, "b": second}
    rows = {k: {"dtype": "F32", "shape": [(e - b) // 4], "data_offsets": [b, e]} for k, (b, e) in spans.items()}
    header = json.dumps(rows).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(max(first[1], second[1])))
    if said is None:
        assert stored_tensors(tmp_path).keys() == load_file(path).keys() == {"a", "b"}
        return
    with pytest.raises(SafetensorError):
        load_file(path)
    with pytest.raises(CheckpointError, match=said):
        stored_tensors(tmp_path)


def test_a_negative_length_is_refused_in_a_type_of_unknown_size_too(tmp_path: Path) -> None:
    write(tmp_path, [4, 1], [0, 16], dtype="NEW")
    assert stored_tensors(tmp_path)["w"].shape == (4, 1)
    write(tmp_path, [4, -1], [0, 16], dtype="NEW")
    with pytest.raises(CheckpointError, match="damaged header"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize(("shape", "size"), [([], 4), ([0, 3], 0), ([2, 2], 16)])
def test_scalars_and_empty_tensors_are_tensors(shape: list[int], size: int, tmp_path: Path) -> None:
    write(tmp_path, shape, [0, size], size=size)
    assert stored_tensors(tmp_path)["w"].shape == tuple(shape)


@pytest.mark.parametrize(("size", "what"), [(15, "truncated"), (17, "damaged")])
def test_a_file_of_another_length_than_its_header_says_is_refused(size: int, what: str, tmp_path: Path) -> None:
    write(tmp_path, [4], [0, 16], size=size)
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=f"is {what}: it has {path.stat().st_size} bytes"):
        stored_tensors(tmp_path)
