"""Full Hugging Face tensors into a complete model folder, which appears whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.errors import CheckpointError, CheckpointWriteError, disk_problem
from slime.plugin.architecture import Architecture
from slime.weights.fp8 import QUANTISED, block_of, weight_names
from slime.weights.hf_config import read_hf_config
from slime.weights.hf_load import SafetensorsFolder
from slime.weights.mapping import first_names
from slime.weights.shards import NamedTensors, buckets, drained
from slime.weights.stored import FP8, INDEX_FILE, SINGLE_FILE, StoredTensor, stored_tensors

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.index.json")
#: type in a source folder -> type in the folder that is written; weights in fp8 have been dequantised
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    FP8: torch.bfloat16,
}
#: file -> (name, bytes, type) of each of its tensors
Written = dict[str, list[tuple[str, int, torch.dtype]]]


def save_hf(
    folder: Path,
    named: NamedTensors,
    source_folder: Path,
    model: Architecture,
    *,
    max_shard_bytes: int = 4 * 2**30,
    also: Callable[[Path], None] | None = None,
) -> None:
    """Write a Hugging Face model folder: the tensors, and everything that is not trained copied from `source_folder`.

    Called on rank 0 with `named_hf_tensors`. The folder is written under another name and renamed at the end; an
    existing one is replaced. Each tensor has the type it has in `source_folder`, whatever the precision of training;
    bfloat16 if that is fp8. Tensors that come in 8 bits stay so.

    Args:
        folder: The folder to write.
        named: Names and full tensors; iterated to the end in any case.
        source_folder: A complete folder of the same model.
        model: The model.
        max_shard_bytes: Size of a file, unless one tensor is larger. Several files get an index.
        also: Writes more files into the folder, which has not got its name yet.

    Raises:
        CheckpointError: Tensors of the model are missing or unknown, or the folder is `source_folder`.
        CheckpointWriteError: The folder cannot be written.
    """
    with drained(named):
        if folder.resolve() == source_folder.resolve():
            raise CheckpointError(f"{folder} was not written: it is the folder of the model that training began with.")
        try:
            _save(folder, named, source_folder, model, max_shard_bytes, also or (lambda _: None))
        except OSError as error:
            raise CheckpointWriteError(f"{folder} cannot be written: {disk_problem(error, folder)}.") from error


def _save(
    folder: Path,
    named: NamedTensors,
    source_folder: Path,
    model: Architecture,
    max_shard_bytes: int,
    also: Callable[[Path], None],
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    work.mkdir()  # not by `tempfile`, which would close it to those whom the user's umask lets in
    try:
        copy_companions(source_folder, work)
        stored, config = stored_tensors(source_folder), read_hf_config(source_folder)
        names = weight_names(stored, block_of(config))
        kept, copies = kept_names(names, model)
        weights = {name: stored[name] for name in names}  # without the scales of those in fp8
        tensors = _in_own_types(chain(_repeated(named, copies), _read(source_folder, sorted(kept))), weights)
        files = _write_tensors(work, tensors, max_shard_bytes)
        expected = {*model.shapes, *kept, *copies}
        _check_complete(folder, {name for held in files.values() for name, _, _ in held}, expected)
        write_config(work, {**config, **model.missing_from(config)}, files)
        also(work)
        move_into_place(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def saved_tensors(folder: Path, named: NamedTensors, source_folder: Path, model: Architecture) -> NamedTensors:
    """What `save_hf` writes to `folder` of these tensors, in its types; not what stays as it is in `source_folder`.

    Raises:
        CheckpointError: At the end, if tensors of the model were missing or unknown.
    """
    stored = stored_tensors(source_folder)
    names = weight_names(stored, block_of(read_hf_config(source_folder)))
    _, copies = kept_names(names, model)
    given = set()
    for name, tensor in _in_own_types(_repeated(named, copies), {name: stored[name] for name in names}):
        given.add(name)
        yield name, tensor
    _check_complete(folder, given, {*model.shapes, *copies})


def kept_names(names: Iterable[str], model: Architecture) -> tuple[set[str], dict[str, str]]:
    """What an export has besides the trained tensors, of the tensors in the folder that the run started with.

    Args:
        names: The weights in that folder.
        model: The model.

    Returns:
        The names of tensors that are kept as they are, and of tensors that repeat a trained one, each with its name.
    """
    carried = {name for name in names if name.startswith(model.carried)} - model.shapes.keys()
    copies = {name: model.copies[name] for name in carried & model.copies.keys()}
    return carried - copies.keys(), copies


def _repeated(named: NamedTensors, copies: Mapping[str, str]) -> NamedTensors:
    """The tensors, each followed by the tensors that repeat it."""
    for name, tensor in named:
        yield name, tensor
        for copy, original in copies.items():
            if original == name:
                yield copy, tensor


def _read(folder: Path, names: Iterable[str]) -> NamedTensors:
    """Weights of a folder."""
    source = SafetensorsFolder(folder)
    for name in names:
        yield name, source.whole(name)


def _in_own_types(named: NamedTensors, stored: Mapping[str, StoredTensor]) -> NamedTensors:
    """The tensors in the types that they have in the folder that the run started with."""
    for name, tensor in named:
        quantised = tensor.dtype.itemsize == 1
        dtype = TYPES.get(stored[name].dtype) if name in stored and not quantised else None
        yield name, tensor if dtype is None else tensor.to(dtype)


def _write_tensors(work: Path, named: NamedTensors, max_shard_bytes: int) -> Written:
    """Write numbered files as tensors arrive, then give them their final names."""
    parts: list[list[tuple[str, int, torch.dtype]]] = []
    # Copies: views share memory, which safetensors refuses, and would change when training continues.
    copies = ((name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in named)
    for bucket in buckets(copies, max_shard_bytes):
        _write_file(work / _part(len(parts)), dict(bucket))
        parts.append([(name, tensor.nbytes, tensor.dtype) for name, tensor in bucket])
    count = len(parts)
    names = file_names(count)
    for index, name in enumerate(names):
        (work / _part(index)).rename(work / name)
    return dict(zip(names, parts, strict=True))


def file_names(count: int) -> list[str]:
    """The names of the files of a model, as transformers gives them."""
    return [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def _part(index: int) -> str:
    return f"part-{index:05}.safetensors"


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointWriteError(f"{path} cannot be written: {disk_problem(error, path)}.") from error


def _check_complete(folder: Path, written: set[str], expected: set[str]) -> None:
    if written != expected:
        missing, unknown = first_names(expected - written), first_names(written - expected)
        raise CheckpointError(
            f"{folder} was not written: the trainer gave {len(written)} tensors, its config.json describes "
            f"{len(expected)}; missing [{missing}], unknown [{unknown}]."
        )


def companions(source: Path) -> Iterator[Path]:
    """Tokenizer, chat template, generation settings, model code: every plain file that does not hold weights."""
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith(".") and not any(map(path.match, _WEIGHT_FILES)):
            yield path


def copy_companions(source: Path, work: Path) -> None:
    """Copy what belongs to a model besides its weights."""
    for path in companions(source):
        shutil.copyfile(path, work / path.name)


def write_config(work: Path, config: Mapping[str, Any], files: Written) -> None:
    """Write the index, if there are several files, and `config.json` with the type of most of the tensors.

    It says that they are quantised only if some are in 8 bits.
    """
    tensors = [tensor for written in files.values() for tensor in written]
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(size for _, size, _ in tensors)},
            "weight_map": {name: file for file, written in files.items() for name, _, _ in written},
        }
        (work / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    bytes_of: Counter[torch.dtype] = Counter()
    for _, size, kind in tensors:
        bytes_of[kind] += size
    quantised = [kind for kind in bytes_of if kind.itemsize == 1]
    for kind in quantised:
        del bytes_of[kind]
    dtype = str(bytes_of.most_common(1)[0][0]).removeprefix("torch.")
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    described = {name: value for name, value in config.items() if quantised or name not in QUANTISED} | {key: dtype}
    (work / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def move_into_place(work: Path, folder: Path) -> None:
    """Rename `work` to `folder`. An existing folder is moved aside first and removed at the end."""
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
