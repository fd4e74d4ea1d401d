"""Full Hugging Face tensors into a complete model folder, which appears whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from slime.errors import CheckpointError
from slime.weights.architectures import read_hf_config
from slime.weights.export import taken_to_the_end
from slime.weights.families.base import HFConfig
from slime.weights.families.table import family_of
from slime.weights.safetensors_folder import INDEX_FILE, SINGLE_FILE

_WEIGHT_FILES = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.index.json",
)


def save_hf(
    folder: Path,
    named: Iterator[tuple[str, Tensor]],
    source_folder: Path,
    *,
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """Write a Hugging Face model folder: the tensors, and everything but weights copied from `source_folder`.

    Called on rank 0 with `named_hf_tensors`.  Files hold at most `max_shard_bytes` (but at least one tensor);
    with more than one there is an index.  Written beside `folder` and renamed at the end, replacing a folder
    that is there.  `config.json` is given the tensors' type.

    Raises `CheckpointError` where tensors of the model are missing or unknown, and where it cannot be written.
    """
    with taken_to_the_end(named):
        try:
            _save(folder, named, source_folder, max_shard_bytes)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be written: {error}.") from error


def _save(folder: Path, named: Iterator[tuple[str, Tensor]], source_folder: Path, max_shard_bytes: int) -> None:
    config = read_hf_config(source_folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        work.chmod(0o755)
        _copy_companions(source_folder, work)
        files = _write_tensors(work, named, max_shard_bytes)
        _check_complete(folder, {name for names in files.values() for name, _, _ in names}, config)
        _write_config(work, config, files)
        _move_into_place(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


Written = dict[str, list[tuple[str, int, torch.dtype]]]  # file -> (name, bytes, type) of each tensor


def _write_tensors(work: Path, named: Iterator[tuple[str, Tensor]], max_shard_bytes: int) -> Written:
    """Write numbered files as tensors come, then give them their final names and the index."""
    parts: list[list[tuple[str, int, torch.dtype]]] = []
    pending: dict[str, Tensor] = {}
    held = 0

    def flush() -> None:
        _write_file(work / _part(len(parts)), pending)
        parts.append([(name, tensor.nbytes, tensor.dtype) for name, tensor in pending.items()])

    for name, tensor in named:
        if pending and held + tensor.nbytes > max_shard_bytes:
            flush()
            pending, held = {}, 0
        # a copy: a view would be refused for sharing memory, and would change when training goes on
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held += tensor.nbytes
    if pending:
        flush()
    count = len(parts)
    names = [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for index, name in enumerate(names):
        (work / _part(index)).rename(work / name)
    return dict(zip(names, parts, strict=True))


def _part(index: int) -> str:
    return f"part-{index:05}.safetensors"


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be written: {error}.") from error


def _check_complete(folder: Path, written: set[str], config: HFConfig) -> None:
    expected = {name for rule in family_of(config).rules(config) for name in rule.hf}
    if written != expected:
        raise CheckpointError(
            f"{folder} was not written: the trainer gave {len(written)} tensors, its config.json describes "
            f"{len(expected)}; missing {sorted(expected - written)[:8]}, unknown {sorted(written - expected)[:8]}."
        )


def _copy_companions(source: Path, work: Path) -> None:
    """Tokenizer, chat template, generation settings, model code: every plain file that is not weights."""
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith(".") and not any(map(path.match, _WEIGHT_FILES)):
            shutil.copyfile(path, work / path.name)


def _write_config(work: Path, config: HFConfig, files: Written) -> None:
    tensors = [entry for entries in files.values() for entry in entries]
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(size for _, size, _ in tensors)},
            "weight_map": {name: file for file, entries in files.items() for name, _, _ in entries},
        }
        (work / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    dtype = str(tensors[0][2]).removeprefix("torch.")
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    (work / "config.json").write_text(json.dumps({**config, key: dtype}, indent=2) + "\n", encoding="utf-8")


def _move_into_place(work: Path, folder: Path) -> None:
    """Rename; a folder that is there is moved aside first, and removed when the new one is in place."""
    if not folder.exists():
        work.rename(folder)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    os.replace(folder, aside)
    try:
        work.rename(folder)
    except OSError:
        with suppress(OSError):
            aside.rename(folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)
