"""Versions of a model's weights on a disk: whole model folders, and deltas with what changed since the one before.

A version is a folder with a manifest, `version.json`: which version it builds on, and a checksum of every tensor as it
is in this version. A whole one is a Hugging Face folder besides. A delta has `changed-00001.safetensors` and so on: for
each piece of a tensor that changed, the exclusive or of old and new bytes, sorted by their place in a number and packed
with zstd. The high bytes of a number rarely change, so most of what is packed is zero.

Needs no torch: it is used by the processes beside the engines too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from slime.errors import CheckpointError, CheckpointWriteError, disk_problem

MANIFEST = "version.json"
#: bytes of a tensor that are compared, packed and checked at a time
PIECE = 64 * 2**20
#: packed bytes in a file, unless one piece is larger
_FILE_BYTES = 256 * 2**20

Bytes = NDArray[np.uint8]


def checksum(data: Bytes | bytes) -> str:
    """Tells whether bytes are those that were written. It protects against accidents, not against attackers."""
    return xxhash.xxh3_128_hexdigest(data if isinstance(data, bytes) else data.data)


def pieces(size: int) -> list[tuple[int, int]]:
    """First byte, and byte after the last, of each piece of a tensor of `size` bytes."""
    return [(begin, min(size, begin + PIECE)) for begin in range(0, size, PIECE)]


@cache
def _zstd() -> Any:
    import pyarrow as pa  # takes a moment to load

    return pa.Codec("zstd", compression_level=1)


def pack(old: Bytes, new: Bytes, itemsize: int) -> bytes:
    """What changed from `old` to `new`, which are of the same length, in numbers of `itemsize` bytes."""
    planes = np.ascontiguousarray((old ^ new).reshape(-1, itemsize).T)
    packed: bytes = _zstd().compress(planes.reshape(-1), asbytes=True)
    return packed


def unpack(old: Bytes, packed: bytes, itemsize: int) -> Bytes:
    """The new bytes. Raises `ValueError` or `OSError` for bytes that cannot have been packed so."""
    plain = _zstd().decompress(packed, decompressed_size=old.size, asbytes=True)
    planes = np.frombuffer(plain, np.uint8)
    if planes.size != old.size:
        raise ValueError(f"{planes.size} bytes were packed, expected {old.size}")
    new = np.empty_like(old)
    for place, plane in enumerate(planes.reshape(itemsize, -1)):  # three times as fast as a transposition
        new[place::itemsize] = plane
    new ^= old
    return new


@dataclass(frozen=True)
class TensorState:
    """A tensor in a version.

    Attributes:
        dtype: Its type as safetensors calls it.
        shape: Its shape.
        itemsize: Bytes of a number.
        checksums: Of its pieces.
    """

    dtype: str
    shape: list[int]
    itemsize: int
    checksums: list[str]


@dataclass(frozen=True)
class Manifest:
    """What a version is.

    Attributes:
        version: Name of its folder, which no other version of any run has.
        base: Name of the version that a delta builds on; None: it is whole.
        tensors: Every tensor as it is in this version.
        changed: Of a delta: tensor -> number of each of its pieces that changed -> the file that has it.
        others: Of a whole one: every file that holds no weights -> its checksum.
    """

    version: str
    base: str | None
    tensors: dict[str, TensorState]
    changed: dict[str, dict[str, str]]
    others: dict[str, str]

    def write(self, folder: Path) -> None:
        """Write it into a folder. Raises `OSError`."""
        body = json.dumps(asdict(self))
        (folder / MANIFEST).write_text(f"{checksum(body.encode())}\n{body}\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of the version in `folder`. Raises `CheckpointError`: it is missing, damaged or another's."""
        path = folder / MANIFEST
        try:
            stated, body = path.read_bytes().split(b"\n", 1)
            body = body.removesuffix(b"\n")
            if checksum(body) != stated.decode():
                raise CheckpointError(f"{path} is damaged: its bytes do not have the checksum in its first line.")
            fields = json.loads(body)
            tensors = {name: TensorState(**fields) for name, fields in fields.pop("tensors").items()}
            manifest = cls(tensors=tensors, **fields)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}.") from error
        if manifest.version != folder.name:
            raise CheckpointError(f"{folder} holds version {manifest.version}: somebody has renamed or copied it.")
        return manifest


class DeltaFiles:
    """The files of a delta that is being written."""

    def __init__(self, folder: Path, writer: int = 0) -> None:
        """Those of one of several writers, into `folder`, which exists."""
        self._folder, self._writer = folder, writer
        self._waiting: dict[str, Bytes] = {}
        self._number = 1
        #: as in the manifest
        self.changed: dict[str, dict[str, str]] = {}
        #: of all packed pieces
        self.bytes = 0

    def add(self, name: str, piece: int, packed: bytes) -> None:
        """Add a piece of a tensor. Raises `CheckpointWriteError`."""
        if self._waiting and sum(one.size for one in self._waiting.values()) + len(packed) > _FILE_BYTES:
            self.flush()
        self._waiting[piece_name(name, piece)] = np.frombuffer(packed, np.uint8)
        self.changed.setdefault(name, {})[str(piece)] = self._file
        self.bytes += len(packed)

    @property
    def _file(self) -> str:
        of_writer = f"{self._writer:05}-" if self._writer else ""
        return f"changed-{of_writer}{self._number:05}.safetensors"

    def flush(self) -> None:
        """Write what waits. Raises `CheckpointWriteError`."""
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        if not self._waiting:
            return
        path = self._folder / self._file
        try:
            save_file(self._waiting, path)
        except (SafetensorError, OSError) as error:
            raise CheckpointWriteError(f"{path} cannot be written: {disk_problem(error, path)}.") from error
        self._waiting, self._number = {}, self._number + 1


def piece_name(name: str, piece: int) -> str:
    """What a piece of a tensor is called in the files of a delta."""
    return f"{name}:{piece}"


def chain_to(version: str, read: Callable[[str], Manifest], held: str | None) -> list[Manifest]:
    """The versions to apply one after the other, to come to `version`: from `held`, or from the newest whole one.

    Args:
        version: The version that is wanted.
        read: Gives the manifest of a version.
        held: The version that is there; None: none is.

    Raises:
        CheckpointError: A version that is needed is gone or damaged.
    """
    chain: list[Manifest] = []
    wanted: str | None = version
    while wanted is not None and wanted != held:
        if any(one.version == wanted for one in chain):
            raise CheckpointError(f"version {version} builds on itself: its manifests are another's.")
        try:
            chain.append(read(wanted))
        except CheckpointError as error:
            if not chain:
                raise
            raise CheckpointError(f"version {chain[-1].version} builds on {wanted}, which is gone: {error}") from error
        wanted = chain[-1].base
    return chain[::-1]


def same_tensors(before: Mapping[str, TensorState], after: Mapping[str, TensorState]) -> bool:
    """Whether two versions have the same names, types and shapes."""
    return before.keys() == after.keys() and all(
        (one.dtype, one.shape) == (after[name].dtype, after[name].shape) for name, one in before.items()
    )
