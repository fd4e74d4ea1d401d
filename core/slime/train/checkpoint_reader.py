"""Reads Megatron's distributed format without running code from it.

The format is made of pickles, and a pickle can name any function and have it called. Megatron and torch unpickle
`.metadata` and the objects between the tensors without restrictions. Here every pickle is read by an unpickler that
knows a list of harmless classes and refuses everything else: one of our own for `.metadata`, torch's for the rest.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from megatron.core.dist_checkpointing.strategies import torch as stock
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from torch.distributed.checkpoint import metadata as formats
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo, _StoragePrefix
from torch.serialization import _get_layout

from slime.errors import CheckpointError

METADATA, _COMMON = ".metadata", "common.pt"
#: files without which a folder is no complete checkpoint
_REQUIRED = ("metadata.json", METADATA, _COMMON)
#: in torch's message about a class that is not on its list
_NOT_ALLOWED = re.compile(r"\bGLOBAL ([\w.]+)")
#: everything that `.metadata` consists of, besides torch's types of numbers
_CLASSES = {
    (one.__module__, one.__qualname__): one
    for one in (
        formats.Metadata,
        formats.StorageMeta,
        formats.MetadataIndex,
        formats.TensorStorageMetadata,
        formats.TensorProperties,
        formats.BytesStorageMetadata,
        formats.ChunkStorageMetadata,
        formats._MEM_FORMAT_ENCODING,
        plans.SavePlan,
        plans.WriteItem,
        plans.WriteItemType,
        plans.TensorWriteData,
        _StorageInfo,
        _StoragePrefix,
        _get_layout,
        torch.Size,
    )
}


@contextmanager
def without_code(folder: Path, *, with_common: bool = True) -> Iterator[TorchCommonLoadStrategy]:
    """Inside the body `dist_checkpointing.load` runs no code from `folder`, if it uses the strategy given here.

    Args:
        folder: The checkpoint.
        with_common: Whether to read what is not sharded, too.

    Raises:
        CheckpointError: As `read_metadata` does.
    """
    # Before torch asks for it: torch logs an error there with its traceback, and tries another file.
    metadata = read_metadata(folder / METADATA)
    reader, planner = stock._get_filesystem_reader, stock.MCoreLoadPlanner
    stock._get_filesystem_reader = lambda folder, **_: _Reader(folder, metadata)
    stock.MCoreLoadPlanner = partial(_Planner, folder)
    try:
        yield _CommonReader(with_common=with_common)
    finally:
        stock._get_filesystem_reader = reader
        stock.MCoreLoadPlanner = planner


def require_complete(folder: Path) -> None:
    """Check that the files that every checkpoint has are there, and are files.

    Raises:
        CheckpointError: One is missing, or is a pipe, for example, from which reading would wait forever.
    """
    for name in _REQUIRED:
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} is no complete training checkpoint (no {name}); expected a folder that slime saved."
            )


def read_metadata(path: Path) -> formats.Metadata:
    """The table of contents of a checkpoint: which part of which tensor is where in which file.

    Raises:
        CheckpointError: It is damaged, names a class that it does not need, or a file outside of its folder.
    """
    try:
        with path.open("rb") as stream:
            metadata: formats.Metadata = _Unpickler(stream, path).load()
        files = {info.relative_path for info in metadata.storage_data.values()}
        valid = isinstance(metadata, formats.Metadata) and all(isinstance(name, str) for name in files)
    except CheckpointError:
        raise
    # Damaged pickles raise almost anything.
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not valid:
        raise CheckpointError(f"{path} is damaged: it is no table of the tensors of a checkpoint")
    for name in sorted(files):
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise CheckpointError(f"{path} names the file {name!r}; expected files of its own folder only")
        if not (path.parent / name).is_file():
            raise CheckpointError(f"{path} names the file {name}, which is not there")
    return metadata


def read_tensors(source: Path | IO[bytes], path: Path) -> Any:
    """What `torch.save` wrote to `source`, if it consists of tensors and plain values.

    Raises:
        CheckpointError: It contains anything else, or is damaged. The message names `path`.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:
        raise blame(path, error) from error


def blame(path: Path, error: BaseException) -> CheckpointError:
    """What torch could not read in the file or folder `path`. Its own text advises to read it without protection."""
    text = str(error)
    if isinstance(error, pickle.UnpicklingError):
        match = _NOT_ALLOWED.search(text)
        return (
            CheckpointError(f"{path} is damaged: torch cannot read it") if match is None else _refused(path, match[1])
        )
    return CheckpointError(f"{path} is damaged: {type(error).__name__}: {next(iter(text.splitlines()), '')}")


def _refused(path: Path, named: str) -> CheckpointError:
    return CheckpointError(
        f"{path} names {named}, which could run code and which no checkpoint of slime contains. Nothing was run. The"
        " file is damaged, or somebody made it to attack you: do not use this checkpoint. If its owner needs such a"
        " class, ask for a Hugging Face folder with safetensors instead (slime convert)."
    )


class _Unpickler(pickle.Unpickler):
    """Builds objects of the listed classes only."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (found := _CLASSES.get((module, name))) is not None:
            return found
        if module == "torch" and isinstance(value := vars(torch).get(name), torch.dtype | torch.layout):
            return value
        raise _refused(self._path, f"{module}.{name}")


class _Reader(FileSystemReader):
    """Torch's reader with metadata that was read safely. It reads the tensors themselves safely already."""

    def __init__(self, folder: str | Path, metadata: formats.Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = formats.StorageMeta()
        metadata.storage_meta.load_id = self.load_id

    def read_metadata(self, *_: Any, **__: Any) -> formats.Metadata:
        return self._metadata


class _Planner(stock.MCoreLoadPlanner):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's planner, which is given objects (state of layers beside their weights) that were read safely.

    Stock, it reads them with `weights_only=False`. A checkpoint also decides what is read as an object: its table may
    call any tensor one.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(**options)
        self._folder = folder

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        safe = io.BytesIO()
        torch.save(read_tensors(value, self._folder / str(read_item.storage_index.fqn)), safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)


class _CommonReader(TorchCommonLoadStrategy):  # type: ignore[misc]  # Megatron is untyped
    """Reads what is not sharded. Stock, an environment variable can turn `weights_only` off."""

    def __init__(self, *, with_common: bool) -> None:
        super().__init__()
        self._with_common = with_common

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        if not self._with_common:
            return {}
        return read_tensors(Path(checkpoint_dir) / _COMMON, Path(checkpoint_dir) / _COMMON)
