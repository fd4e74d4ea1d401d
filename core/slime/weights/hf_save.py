"""Full Hugging Face tensors into a complete model folder, which appears whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
from slime.weights.shards import NamedTensors, buckets, drained, type_name
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
#: file -> (name, bytes, torch's name of its type) of each of its tensors
Written = dict[str, list[tuple[str, int, str]]]
#: is given a name, and the tensor as it is written, in host memory
See = Callable[[str, Tensor], None]
_SHARD_BYTES = 4 * 2**30


def save_hf(
    folder: Path,
    named: NamedTensors,
    source_folder: Path,
    model: Architecture,
    *,
    max_shard_bytes: int = _SHARD_BYTES,
    also: Callable[[Path], None] | None = None,
) -> None:
    """Write a Hugging Face model folder: the tensors, and everything that is not trained copied from `source_folder`.

    Called on rank 0 with `named_hf_tensors`. An existing folder is replaced. Each tensor has the type it has in
    `source_folder`, whatever the precision of training; bfloat16 if that is fp8. Tensors that come in 8 bits stay so.

    Args:
        folder: The folder to write.
        named: Names and full tensors; iterated to the end in any case.
        source_folder: A complete folder of the same model.
        model: The model.
        max_shard_bytes: Size of a file, unless one tensor is larger. Several files get an index.
        also: Writes more files into the folder, which has not got its name yet.

    Raises:
        CheckpointError: Tensors of the model are missing, unknown or written twice, or the folder is `source_folder`.
        CheckpointWriteError: The folder cannot be written.
    """
    with drained(named):
        if folder.resolve() == source_folder.resolve():
            raise CheckpointError(f"{folder} was not written: it is the folder of the model that training began with.")
        with appearing(folder) as work:
            parts = write_part(work, named, source_folder, model, max_shard_bytes=max_shard_bytes)
            complete(work, folder, parts, source_folder, model)
            if also is not None:
                also(work)


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder that gets its name when the body has filled it, in place of an existing one; removed if the body fails.

    Raises:
        CheckpointWriteError: It cannot be written; also for any `OSError` of the body.
    """
    work = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir()  # not by `tempfile`, which would close it to those whom the user's umask lets in
        yield work
        move_into_place(work, folder)
    except OSError as error:
        raise CheckpointWriteError(f"{folder} cannot be written: {disk_problem(error, folder)}.") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def complete(work: Path, folder: Path, parts: Written, source_folder: Path, model: Architecture) -> None:
    """Make a model folder of what all writers have written.

    Args:
        work: The folder into which they wrote.
        folder: Its later name, for the error.
        parts: What they wrote; the files get their final names.
        source_folder: As of `save_hf`.
        model: As of `save_hf`.

    Raises:
        CheckpointError: Tensors of the model are missing, unknown or written twice.
    """
    copy_companions(source_folder, work)
    config = read_hf_config(source_folder)
    _, kept, copies = _source_weights(source_folder, model)
    written = [name for tensors in parts.values() for name, _, _ in tensors]
    _check_complete(folder, written, {*model.shapes, *kept, *copies})
    files = dict(zip(file_names(len(parts)), parts.values(), strict=True))
    for part_name, name in zip(parts, files, strict=True):
        (work / part_name).rename(work / name)
    write_config(work, {**config, **model.missing_from(config)}, files)


def write_part(
    work: Path,
    named: NamedTensors,
    source_folder: Path,
    model: Architecture,
    *,
    writer: int = 0,
    max_shard_bytes: int = _SHARD_BYTES,
    see: See = lambda _, __: None,
) -> Written:
    """One writer's part of a model folder: its tensors, each followed by those that repeat it.

    Args:
        work: The folder of all writers, of which `complete` makes a model folder.
        named: This writer's tensors.
        source_folder: As of `save_hf`.
        model: As of `save_hf`.
        writer: Number of the writer. The first, 0, also writes what stays as it is in `source_folder`.
        max_shard_bytes: As of `save_hf`.
        see: Is given each tensor that is written.

    Returns:
        What was written.

    Raises:
        CheckpointWriteError: A file cannot be written.
    """
    weights, kept, copies = _source_weights(source_folder, model)
    stay = _read(source_folder, sorted(kept)) if writer == 0 else ()
    parts: Written = {}
    # Copies: views share memory, which safetensors refuses, and would change when training continues.
    own_types = _in_own_types(chain(_repeated(named, copies), stay), weights)
    on_host = ((name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in own_types)
    for bucket in buckets(on_host, max_shard_bytes):
        file = f"part-{writer:05}-{len(parts):05}.safetensors"
        write_file(work / file, dict(bucket))
        for name, tensor in bucket:
            see(name, tensor)
            del tensor
        parts[file] = [(name, tensor.nbytes, type_name(tensor.dtype)) for name, tensor in bucket]
        bucket.clear()  # before the next is collected
    return parts


def saved_tensors(
    folder: Path, named: NamedTensors, source_folder: Path, model: Architecture, expected: Iterable[str]
) -> NamedTensors:
    """What `write_part` writes for `folder` of these tensors, in its types; not what stays as in `source_folder`.

    Args:
        folder: For the error.
        named: A writer's tensors.
        source_folder: As of `save_hf`.
        model: As of `save_hf`.
        expected: What the writer wrote before, with or without what stays.

    Raises:
        CheckpointError: At the end, if these are not the same tensors.
    """
    weights, kept, copies = _source_weights(source_folder, model)
    given = []
    for name, tensor in _in_own_types(_repeated(named, copies), weights):
        given.append(name)
        yield name, tensor
    _check_complete(folder, given, {*expected} - kept)


def _source_weights(folder: Path, model: Architecture) -> tuple[dict[str, StoredTensor], set[str], dict[str, str]]:
    """The weights in a folder, without the scales of those in fp8, and which of them are kept or repeat others."""
    stored = stored_tensors(folder)
    names = weight_names(stored, block_of(read_hf_config(folder)))
    return {name: stored[name] for name in names}, *kept_names(names, model)


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


def file_names(count: int) -> list[str]:
    """The names of the files of a model, as transformers gives them."""
    return [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file. Raises `CheckpointWriteError` or `OSError`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointWriteError(f"{path} cannot be written: {disk_problem(error, path)}.") from error


def _check_complete(folder: Path, written: Collection[str], expected: set[str]) -> None:
    twice = {name for name, count in Counter(written).items() if count > 1}
    if twice or {*written} != expected:
        missing, unknown = first_names(expected.difference(written)), first_names({*written} - expected)
        raise CheckpointError(
            f"{folder} was not written: the trainer gave {len(written)} tensors, its config.json describes "
            f"{len(expected)}; missing [{missing}], unknown [{unknown}], twice [{first_names(twice)}]."
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
    bytes_of: Counter[str] = Counter()
    for _, size, kind in tensors:
        bytes_of[kind] += size
    quantised = [kind for kind in bytes_of if getattr(torch, kind).itemsize == 1]
    for kind in quantised:
        del bytes_of[kind]
    dtype = bytes_of.most_common(1)[0][0]
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
