"""The tensors of a Hugging Face folder as its files describe them: names, types, shapes, places. Needs no torch.

A header is read in a millisecond, whatever the size of the file, so a damaged model is found before anything starts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from slime.errors import CheckpointError
from slime.weights.hf_config import read_json
from slime.weights.mapping import first_names

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

#: the same weights under their publisher's names, which engines leave out if it is the only file beside the model's
_ORIGINAL = "consolidated.safetensors"

#: type -> bytes of a number, and its exponent's bits: a number with all of them set is infinite or not a number
FLOATS = {"F64": (8, 0x7FF0 << 48), "F32": (4, 0x7F80 << 16), "F16": (2, 0x7C00), "BF16": (2, 0x7F80)}
#: numbers of 8 bits, which need a scale; this type has no infinity, and two patterns that are not a number
FP8 = "F8_E4M3"
_NUMBERS = {**FLOATS, FP8: (1, 0x7F)}
#: bytes of a header in front of which its length is written; safetensors refuses longer ones too
_LENGTH, _LONGEST_HEADER = 8, 100_000_000
#: bytes that are read at a time: of a sample, which has so many pieces of each tensor, and of everything
_PIECE, _SAMPLED, _LARGE_PIECE = 16 * 1024, 4, 4 * 2**20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file."""

    path: Path
    dtype: str  #: "F32", "BF16", ...
    shape: tuple[int, ...]
    begin: int  #: first byte in the file
    end: int  #: byte after the last


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a model folder by name.

    Raises:
        CheckpointError: There are no weights, or a file is missing, truncated, damaged, or not where the index says.
    """
    index = read_index(folder)
    if index is None:
        _require_alone(folder)
        return read_header(folder / SINGLE_FILE)
    headers = {file: read_header(folder / file) for file in sorted(set(index.values()))}
    absent = [name for name, file in index.items() if name not in headers[file]]
    if absent:
        raise CheckpointError(
            f"{folder / INDEX_FILE} names {len(absent)} tensors that are not in their files: {first_names(absent)}."
        )
    tensors = {name: headers[file][name] for name, file in index.items()}
    if SINGLE_FILE not in headers and (folder / SINGLE_FILE).is_file():
        _require_same(tensors, read_header(folder / SINGLE_FILE), folder)
    return tensors


def _require_alone(folder: Path) -> None:
    """Without an index, engines read every file, and transformers only one."""
    others = sorted(path.name for path in folder.glob("*.safetensors") if path.name != SINGLE_FILE)
    if others and others != [_ORIGINAL]:
        raise CheckpointError(
            f"{folder} has {', '.join(others)} beside {SINGLE_FILE}, and no {INDEX_FILE}: engines would read all of"
            f" them, and transformers {SINGLE_FILE} alone. Remove the files that do not belong to the model."
        )


def _require_same(indexed: Mapping[str, StoredTensor], single: Mapping[str, StoredTensor], folder: Path) -> None:
    """With both, engines read the files of the index, and transformers the single one."""
    different = indexed.keys() ^ single.keys()
    different |= {name for name in indexed.keys() & single.keys() if not _same(indexed[name], single[name])}
    if different:
        raise CheckpointError(
            f"{folder} holds two models: the files of {INDEX_FILE}, which engines read, and {SINGLE_FILE}, which"
            f" transformers reads, differ in {len(different)} tensors: {first_names(different)}. Remove one of them."
        )


def read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file, of a folder with several files; None if there is only `model.safetensors`.

    Raises:
        CheckpointError: The folder has neither, or the index is broken or names files outside the folder.
    """
    path = folder / INDEX_FILE
    if not path.is_file():
        if (folder / SINGLE_FILE).is_file():
            return None
        held = ", ".join(sorted(one.name for one in folder.glob("*"))[:12]) or "nothing"
        raise CheckpointError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; it holds {held}. Save the model with safetensors."
        )
    try:
        table = read_json(path)["weight_map"]
        file_of = {str(name): str(file) for name, file in table.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors index: {error!r}.") from error
    # By name, not by where links lead: the Hub's own cache is made of links.
    outside = sorted({file for file in file_of.values() if Path(file).is_absolute() or ".." in Path(file).parts})
    if outside:
        raise CheckpointError(f"{path} names files outside the folder: {first_names(outside)}. Do not use this model.")
    absent = sorted(file for file in set(file_of.values()) if not (folder / file).is_file())
    if absent:
        raise CheckpointError(f"{path} names files that are not there: {', '.join(absent)}. Download them again.")
    return file_of


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file.

    Raises:
        CheckpointError: It cannot be read, is truncated, or is no safetensors file.
    """
    try:
        # Opening a pipe would wait for its writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{path} is not a file.")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH), "little")
            if size < _LENGTH or not 2 <= length <= min(size - _LENGTH, _LONGEST_HEADER):
                raise CheckpointError(
                    f"{path} is truncated or no safetensors file: it has {size} bytes. Download it again."
                )
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {str(name): _tensor(path, entry, _LENGTH + length) for name, entry in header.items()}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a damaged header ({type(error).__name__}). Download it again.") from error
    expected = _LENGTH + length
    for name, tensor in sorted(tensors.items(), key=lambda one: (one[1].begin, one[1].end)):
        if tensor.begin != expected:
            what = "overlaps the tensor before it" if tensor.begin < expected else "leaves a gap before it"
            raise CheckpointError(f"{path} has a damaged header: {name} {what} (data_offsets). Download it again.")
        expected = tensor.end
    if size != expected:
        what = "truncated" if size < expected else "damaged"
        raise CheckpointError(
            f"{path} is {what}: it has {size} bytes, and its header describes {expected}. Download it again."
        )
    return tensors


def _tensor(path: Path, entry: dict[str, Any], start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(length) for length in entry["shape"])
    size, _ = _NUMBERS.get(entry["dtype"], (0, 0))
    possible = 0 <= begin <= end and all(length >= 0 for length in shape)
    if not possible or (size and math.prod(shape) * size != end - begin):
        raise ValueError("sizes contradict each other")
    return StoredTensor(path, str(entry["dtype"]), shape, start + int(begin), start + int(end))


def not_finite(
    tensors: dict[str, StoredTensor], *, everything: bool, tell: Callable[[int, int], object] = lambda *_: None
) -> Iterator[str]:
    """Names of tensors that contain NaN or infinity.

    Args:
        tensors: The tensors to look at.
        everything: Read them completely, instead of evenly spaced pieces of each.
        tell: Called before each with the number that was looked at, and their number.

    Raises:
        CheckpointError: A file cannot be read.
    """
    done = itertools.count()
    by_file: dict[Path, list[tuple[str, StoredTensor]]] = {}
    for name, tensor in tensors.items():
        by_file.setdefault(tensor.path, []).append((name, tensor))
    for path, held in by_file.items():
        try:
            with path.open("rb") as file:
                for name, tensor in sorted(held, key=lambda one: one[1].begin):
                    tell(next(done), len(tensors))
                    if any(_has_wrong(file, tensor, *piece) for piece in _pieces(tensor, everything=everything)):
                        yield name
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def tied_problem(stored: Mapping[str, StoredTensor], embedding: str, output: str, *, everything: bool) -> str | None:
    """What is wrong if a model with tied embeddings is stored with an output layer that is not the embedding.

    Args:
        stored: The tensors of the folder.
        embedding: Name of the embedding.
        output: Name of the output layer, which some tools write as a copy.
        everything: Compare them completely, instead of evenly spaced pieces.

    Raises:
        CheckpointError: A file cannot be read.
    """
    if embedding not in stored or output not in stored:
        return None
    if _same(stored[embedding], stored[output], everything=everything):
        return None
    return (
        f"{output} differs from {embedding}, and config.json says that the model has one matrix for both"
        " (tie_word_embeddings). Set tie_word_embeddings to false if the model was trained with two; otherwise remove"
        f" {output}"
    )


def _same(one: StoredTensor, other: StoredTensor, *, everything: bool = False) -> bool:
    """Whether two tensors have the same type, shape and bytes: all of them, or evenly spaced pieces."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    try:
        with one.path.open("rb") as first, other.path.open("rb") as second:
            for begin, size in _pieces(one, everything=everything):
                first.seek(begin)
                second.seek(begin - one.begin + other.begin)
                if first.read(size) != second.read(size):
                    return False
    except OSError as error:
        raise CheckpointError(f"{one.path.parent} cannot be read: {error.strerror}.") from error
    return True


def sample_digest(folder: Path) -> str:
    """A sha256 over the names, types and shapes of a model's tensors and a sample of the bytes of each.

    Models that were trained or converted differently have different digests, wherever their folders are.

    Raises:
        CheckpointError: As `stored_tensors` does, or a file cannot be read.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(stored_tensors(folder).items()):
        digest.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
        try:
            with tensor.path.open("rb") as file:
                for begin, size in _pieces(tensor, everything=False):
                    file.seek(begin)
                    digest.update(file.read(size))
        except OSError as error:
            raise CheckpointError(f"{tensor.path} cannot be read: {error.strerror}.") from error
    return digest.hexdigest()


def _pieces(tensor: StoredTensor, *, everything: bool) -> Iterator[tuple[int, int]]:
    """First byte and size of the pieces to read. A sample has the first piece, the last, and some in between."""
    size = _LARGE_PIECE if everything else _PIECE
    pieces = -(-(tensor.end - tensor.begin) // size)
    few = pieces if everything else min(pieces, _SAMPLED)
    for number in range(few):
        begin = tensor.begin + (number * (pieces - 1) // max(1, few - 1)) * size
        yield begin, min(size, tensor.end - begin)


def _has_wrong(file: BinaryIO, tensor: StoredTensor, begin: int, size: int) -> bool:
    import numpy as np

    width, exponent = _NUMBERS[tensor.dtype]
    file.seek(begin)
    numbers = np.frombuffer(file.read(size), dtype=f"<u{width}")
    mask = numbers.dtype.type(exponent)
    return bool(((numbers & mask) == mask).any())
