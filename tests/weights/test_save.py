"""Writing a complete Hugging Face folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.families import read_architecture
from tests.support.full_disk import on_a_small_disk
from tests.support.model_folders import Folders
from tests.support.tiny_models import VOCAB_SIZE
from torch import Tensor

from slime.errors import CheckpointError
from slime.weights.hf_load import SafetensorsFolder
from slime.weights.hf_save import save_hf


def _tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("max_shard_bytes", [2**30, 100_000], ids=["one-file", "sharded"])
def test_a_saved_folder_loads_in_transformers_with_equal_logits(
    model_folder: Folders, tmp_path: Path, max_shard_bytes: int
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, weights = model_folder("qwen3", seed=1), _tensors(model_folder("qwen3", seed=2))
    save_hf(tmp_path / "out", iter(weights.items()), source, read_architecture(source), max_shard_bytes=max_shard_bytes)
    tokens = torch.arange(VOCAB_SIZE)[None, :40]
    logits = []
    for folder in (tmp_path / "out", model_folder("qwen3", seed=2)):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert torch.equal(*logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert SafetensorsFolder(tmp_path / "out").names == weights.keys()


def test_shards_stay_below_the_limit_and_the_index_adds_them_up(model_folder: Folders, tmp_path: Path) -> None:
    source = model_folder("llama")
    save_hf(
        tmp_path / "out", iter(_tensors(source).items()), source, read_architecture(source), max_shard_bytes=100_000
    )
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 100_000 for file in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in _tensors(source).values())
    assert set(index["weight_map"].values()) == {file.name for file in files}


@pytest.mark.parametrize(("trained", "key"), [(torch.float32, "torch_dtype"), (torch.bfloat16, "dtype")])
def test_each_tensor_has_the_type_of_the_original_model(
    model_folder: Folders, tmp_path: Path, trained: torch.dtype, key: str
) -> None:
    weights = _tensors(model_folder("llama"))
    shutil.copytree(model_folder("llama"), tmp_path / "half")
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    config[key] = config.pop("torch_dtype")  # newer files have the shorter key
    (tmp_path / "half" / "config.json").write_text(json.dumps(config))
    # A model in half precision with one tensor in full, as some models keep their norms.
    half = {name: tensor if name == "model.norm.weight" else tensor.bfloat16() for name, tensor in weights.items()}
    save_file(half, tmp_path / "half" / "model.safetensors", metadata={"format": "pt"})
    save_hf(
        tmp_path / "out",
        ((name, tensor.to(trained)) for name, tensor in weights.items()),
        tmp_path / "half",
        read_architecture(tmp_path / "half"),
    )
    saved = _tensors(tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in saved.items()} == {name: part.dtype for name, part in half.items()}
    if trained == torch.float32:
        assert all(torch.equal(saved[name], half[name]) for name in half)
    assert json.loads((tmp_path / "out" / "config.json").read_text())[key] == "bfloat16"


def test_the_original_model_is_never_replaced(model_folder: Folders, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_folder("llama"), model)
    (tmp_path / "link").symlink_to(model)
    for target in (model, tmp_path / "link", tmp_path / "x" / ".." / "model"):
        with pytest.raises(CheckpointError, match="the model that training began with") as refused:
            save_hf(target, iter(_tensors(model).items()), model, read_architecture(model))
        assert refused.value.exit_code == 2
    assert (model / "model.safetensors").is_file()


def test_a_full_disk_is_named_with_its_free_bytes_and_the_old_export_stays(
    model_folder: Folders, tmp_path: Path
) -> None:
    source = model_folder("llama")
    save_hf(tmp_path / "out", iter(_tensors(source).items()), source, read_architecture(source))
    message = on_a_small_disk(
        save_hf, tmp_path / "out", iter(_tensors(source).items()), source, read_architecture(source)
    )
    assert message is not None and "\n" not in message
    assert re.search(rf"{tmp_path}/\S+ cannot be written: .*; [\d,]+ bytes are free in {tmp_path}", message), message
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert _tensors(tmp_path / "out").keys() == _tensors(source).keys()
    save_hf(tmp_path / "out", iter(_tensors(source).items()), source, read_architecture(source))  # it can be repeated


def test_an_incomplete_model_is_not_written_and_the_old_folder_stays(model_folder: Folders, tmp_path: Path) -> None:
    source = model_folder("llama")
    tensors = _tensors(source)
    save_hf(tmp_path / "out", iter(tensors.items()), source, read_architecture(source))
    part = [(name, tensor) for name, tensor in tensors.items() if name != "model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"missing \[model\.norm\.weight\]") as refused:
        save_hf(tmp_path / "out", iter(part), source, read_architecture(source))
    assert refused.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert _tensors(tmp_path / "out").keys() == tensors.keys()


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o700), (0o022, 0o755)])
def test_the_folder_has_the_rights_that_the_umask_gives(
    umask: int, mode: int, model_folder: Folders, tmp_path: Path
) -> None:
    source = model_folder("llama")
    before = os.umask(umask)
    try:
        save_hf(tmp_path / "out", iter(_tensors(source).items()), source, read_architecture(source))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == mode
    for file in (tmp_path / "out").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) & umask == 0, file


def test_an_existing_folder_is_replaced(model_folder: Folders, tmp_path: Path) -> None:
    old, new = model_folder("llama", seed=1), model_folder("llama", seed=2)
    for folder in (old, new):
        save_hf(tmp_path / "out", iter(_tensors(folder).items()), old, read_architecture(old))
    assert torch.equal(_tensors(tmp_path / "out")["lm_head.weight"], _tensors(new)["lm_head.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_all_tensors_are_consumed_if_saving_fails(model_folder: Folders, tmp_path: Path) -> None:
    """Other ranks gather with rank 0; they must not be left waiting."""
    source = model_folder("llama")
    taken: list[str] = []

    def named() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in _tensors(source).items():
            taken.append(name)
            yield name, tensor

    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written") as refused:
        save_hf(tmp_path / "file" / "out", named(), source, read_architecture(source))
    assert refused.value.exit_code == 1
    assert len(taken) == len(_tensors(source))
