"""Writes a Hugging Face model folder tensor by tensor, so that memory holds one tensor at a time.

The files appear in `.NAME.partial` beside the folder. Each gets its name when it is complete, so that a conversion that
was killed goes on with the next one. The folder gets its name at the end.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from slime import __version__
from slime.errors import CheckpointError, CheckpointWriteError, disk_problem
from slime.weights.hf_config import read_hf_config
from slime.weights.hf_load import SafetensorsFolder
from slime.weights.hf_save import TYPES, companions, copy_companions, file_names, move_into_place, write_config
from slime.weights.mapping import first_names
from slime.weights.shards import type_name
from slime.weights.stored import read_header

logger = logging.getLogger("slime.planner")

#: what the files in a partial folder are made from
_ORIGIN = "conversion.json"
_LOCK = "conversion.lock"
#: ending of the name of a file that is being written
_UNFINISHED = ".unfinished"
#: numbers of a tensor that are written at once
_PIECE = 2**20
#: safetensors' names of the types that are written
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Conversion:
    """What to write, and where it comes from.

    Attributes:
        source_folder: The model folder of which configuration, tokenizer and the like are copied.
        config: Its `config.json`.
        tensors: The tensors to write, in an order in which they can be read quickly.
        read: Gives a tensor by its name, in any type.
        origin: Identifies everything that the tensors depend on: files of another origin are not continued.
        max_shard_bytes: Size of a file, unless one tensor is larger.
    """

    source_folder: Path
    config: Mapping[str, Any]
    tensors: Sequence[Output]
    read: Read
    origin: str
    max_shard_bytes: int = 4 * 2**30

    def write(self, folder: Path, *, verify: bool = False, report: Callable[[str], None] = logger.info) -> None:
        """Write the folder, which must be new or empty.

        Args:
            folder: The folder.
            verify: Read everything back, from source and result, before the folder gets its name.
            report: Is told what is being done.

        Raises:
            CheckpointError: There is no space for the folder, it cannot be written, another process is writing it, or
                what was read back differs.
        """
        work = folder.parent / f".{folder.name}.partial"
        files = dict(zip(file_names(len(shards := self._shards())), shards, strict=True))
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            work.mkdir(exist_ok=True)
            with _alone_in(work, folder):
                self._discard_others(work, report)
                missing = [held for name, held in files.items() if not _holds(work / name, held)]
                require_space(folder, missing, self.source_folder)
                for number, (name, held) in enumerate(files.items(), start=1):
                    kept = _holds(work / name, held)
                    report(f"{name} ({number} of {len(files)}): {'is there already' if kept else 'writing'}")
                    if not kept:
                        _write_file(work / name, held, self.read)
                if verify:
                    for name, held in files.items():
                        report(f"{name}: comparing")
                        self._compare(work / name, held)
                copy_companions(self.source_folder, work)
                written = {
                    name: [(one.name, one.nbytes, type_name(one.dtype)) for one in held] for name, held in files.items()
                }
                write_config(work, self.config, written)
                (work / _ORIGIN).unlink()
                (work / _LOCK).unlink()
                if folder.is_dir():
                    folder.rmdir()  # it is empty: anything else was refused
                move_into_place(work, folder)
        except OSError as error:
            raise CheckpointWriteError(f"{folder} cannot be written: {disk_problem(error, folder)}.") from error

    def _shards(self) -> list[list[Output]]:
        """The tensors of each file, in the order in which they are written."""
        shards: list[list[Output]] = []
        size = 0
        for tensor in self.tensors:
            if not shards or size + tensor.nbytes > self.max_shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(tensor)
            size += tensor.nbytes
        # Wide types first: each number then begins at a multiple of its size, as readers need it.
        return [sorted(held, key=lambda one: -one.dtype.itemsize) for held in shards]

    def _discard_others(self, work: Path, report: Callable[[str], None]) -> None:
        """Delete what an earlier conversion left, if it was of something else."""
        listed = [(one.name, one.shape, str(one.dtype)) for one in self.tensors]
        text = json.dumps([__version__, self.origin, self.max_shard_bytes, listed])
        origin = {"origin": hashlib.sha256(text.encode()).hexdigest()}
        path = work / _ORIGIN
        try:
            same = json.loads(path.read_text(encoding="utf-8")) == origin
        except (OSError, ValueError):
            same = False
        if same:
            report(f"continuing the conversion in {work}")
            for one in work.glob(f"*{_UNFINISHED}"):
                one.unlink()
            return
        for one in work.iterdir():
            if one.name != _LOCK:
                one.unlink()
        path.write_text(json.dumps(origin), encoding="utf-8")

    def _compare(self, path: Path, held: Sequence[Output]) -> None:
        """Compare a written file with the source, bit for bit. It is read by the library that its readers use."""
        from safetensors import SafetensorError, safe_open

        different = []
        for one in held:
            expected = _bits(self.read(one.name).to(one.dtype))
            try:
                with safe_open(path, framework="pt") as file:  # opened again each time, so that memory is given back
                    found = file.get_tensor(one.name)
            except SafetensorError as error:
                raise CheckpointWriteError(f"{path}: tensor {one.name} cannot be read back: {error}.") from error
            if found.dtype != one.dtype or tuple(found.shape) != one.shape or not torch.equal(_bits(found), expected):
                different.append(one.name)
        if different:
            raise CheckpointWriteError(
                f"{path} differs from what was to be written in {len(different)} tensors: {first_names(different)}."
                " Disk or memory is faulty, or the source changed meanwhile. Delete the file and convert again."
            )


def unquantised(folder: Path, origin: str) -> Conversion:
    """The conversion of a folder with fp8 weights to the numbers they stand for, in bfloat16.

    Args:
        folder: The folder.
        origin: Identifies its content.
    """
    source = SafetensorsFolder(folder, keeps_open=False)
    tensors = outputs(source, {name: source.shape(name) for name in source.stored if name in source.names})
    return Conversion(folder, read_hf_config(folder), tensors, source.whole, origin)


def outputs(source: SafetensorsFolder, shapes: Mapping[str, tuple[int, ...]]) -> list[Output]:
    """Tensors of these shapes, each in the type in which a folder has it; bfloat16 for fp8.

    Raises:
        CheckpointError: No weight can have this type.
    """
    wrong = [f"{name} ({source.stored[name].dtype})" for name in shapes if source.stored[name].dtype not in TYPES]
    if wrong:
        raise CheckpointError(f"{source.folder} has tensors that are no floating-point numbers: {first_names(wrong)}.")
    return [Output(name, shape, TYPES[source.stored[name].dtype]) for name, shape in shapes.items()]


def require_space(folder: Path, shards: Iterable[Sequence[Output]], source_folder: Path) -> None:
    """Check that the disk has space for what will be written to `folder`: else an hour of writing may be in vain.

    Args:
        folder: The folder.
        shards: The tensors of each file.
        source_folder: The model folder of which the files without weights are copied.

    Raises:
        CheckpointWriteError: It has not.
    """
    needed = sum(len(_header(held)) + sum(one.nbytes for one in held) for held in shards)
    needed += sum(path.stat().st_size for path in companions(source_folder))
    place = next(parent for parent in folder.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise CheckpointWriteError(
            f"{folder} cannot be written: it needs {needed:,} bytes, and {free:,} are free in {place}. Free some, or"
            " choose another DIR."
        )


@contextmanager
def _alone_in(work: Path, folder: Path) -> Iterator[None]:
    """Two conversions into the same folder would write the same files at the same time."""
    with (work / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointWriteError(f"{folder} is being written by another `slime convert`.") from None
        yield


def _holds(path: Path, held: Sequence[Output]) -> bool:
    """Whether a file is complete."""
    try:
        stored = read_header(path)
    except CheckpointError:
        return False
    return {name: (one.dtype, one.shape) for name, one in stored.items()} == {
        one.name: (_NAMES[one.dtype], one.shape) for one in held
    }


def _write_file(path: Path, held: Sequence[Output], read: Read) -> None:
    """Write a safetensors file: the library's own writer needs all tensors of a file at once."""
    unfinished = path.with_name(f"{path.name}{_UNFINISHED}")
    with unfinished.open("wb") as file:
        file.write(_header(held))
        for one in held:
            _write_tensor(file, one, read(one.name))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def _write_tensor(file: BinaryIO, output: Output, tensor: Tensor) -> None:
    if tuple(tensor.shape) != output.shape:
        raise CheckpointError(f"{output.name} has shape {list(tensor.shape)}, expected {list(output.shape)}.")
    for part in torch.split(tensor.reshape(-1), _PIECE):  # no second matrix of this size in another type
        file.write(_bits(part.to(output.dtype)).numpy().data)


def _header(held: Sequence[Output]) -> bytes:
    """What a safetensors file begins with."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in held:
        begin, end = end, end + one.nbytes
        header[one.name] = {"dtype": _NAMES[one.dtype], "shape": one.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
