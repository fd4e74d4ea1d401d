"""An engine's own copy of the weights, on a disk of its node, which follows the versions on a shared disk.

Nothing is believed: each piece of a tensor is compared with its checksum before it is written, and a copy of which it
is not known that it is whole is made anew.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from slime.errors import CheckpointError, disk_problem
from slime.weights.deltas import (
    MANIFEST,
    Bytes,
    Manifest,
    TensorState,
    chain_to,
    checksum,
    piece_name,
    pieces,
    same_tensors,
    unpack,
)
from slime.weights.stored import StoredTensor, read_header, stored_tensors

_STATE = "state.json"
#: pieces that are read and unpacked at once, each of which takes a few times its bytes
_THREADS = min(8, os.cpu_count() or 1)


class LocalCopy:
    """The copy in a folder, which nobody else changes."""

    def __init__(self, folder: Path) -> None:
        """`folder` is made when it is needed."""
        self._folder = folder
        #: the model folder of the copy
        self.model = folder / "model"

    def bring_to(self, versions: Path, version: str) -> Path:
        """Make it the version of this name in the folder `versions`; the copy's model folder.

        Raises:
            CheckpointError: A version that is needed is gone, damaged or does not follow; the copy cannot be written.
        """
        held = self.held()
        try:
            try:
                self._follow(versions, version, held)
            except CheckpointError:
                if held is None:
                    raise
                # The copy may be damaged, or of an earlier sender.
                self._follow(versions, version, None)
        except OSError as error:
            raise CheckpointError(
                f"the copy of the weights in {self._folder} cannot be written: {disk_problem(error, self.model)}."
                " TMPDIR of the node says where it is."
            ) from error
        return self.model

    def held(self) -> str | None:
        """The version that the copy is known to be; None: none, or its files have changed since they were written."""
        try:
            state = json.loads((self._folder / _STATE).read_text(encoding="utf-8"))
            return str(state["version"]) if state["files"] == self._files() else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def apply(self, source: Path) -> None:
        """Apply the version in the folder `source`: a whole one, or a delta of the version that the copy is.

        Raises:
            CheckpointError: It is damaged, or does not build on what the copy is.
            OSError: The copy cannot be written.
        """
        manifest, held = Manifest.read(source), self.held()
        if manifest.base is not None and manifest.base != held:
            raise CheckpointError(
                f"{source} changes version {manifest.base}, and the copy in {self._folder} is"
                f" {f'version {held}' if held else 'no whole version'}: it is not applied."
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._unknown(manifest):
            if manifest.base is None:
                self._take_whole(source, manifest)
            else:
                self._take_delta(source, manifest)

    def _follow(self, versions: Path, version: str, held: str | None) -> None:
        for manifest in chain_to(version, lambda name: Manifest.read(versions / name), held):
            self.apply(versions / manifest.version)

    @contextmanager
    def _unknown(self, manifest: Manifest) -> Iterator[None]:
        """The body changes the copy, which is this version if it comes to its end, and otherwise nobody knows what."""
        state = self._folder / _STATE
        state.unlink(missing_ok=True)
        yield
        state.write_text(json.dumps({"version": manifest.version, "files": self._files()}), encoding="utf-8")

    def _files(self) -> dict[str, list[int]]:
        """What shows that a file was changed."""
        found = {path.name: path.stat() for path in self.model.iterdir()}
        return {name: [at.st_size, at.st_mtime_ns, at.st_ino] for name, at in sorted(found.items())}

    def _take_whole(self, source: Path, manifest: Manifest) -> None:
        shutil.rmtree(self.model, ignore_errors=True)
        self.model.mkdir()
        stored = stored_tensors(source)
        for file in [*manifest.others, *sorted({tensor.path.name for tensor in stored.values()})]:
            try:
                shutil.copyfile(source / file, self.model / file)
            except FileNotFoundError:
                raise CheckpointError(f"{source / file} is gone.") from None
        for file, stated in manifest.others.items():
            if checksum((self.model / file).read_bytes()) != stated:
                raise CheckpointError(f"{source / file} is damaged: it does not have its checksum.")
        held = stored_tensors(self.model)
        _require(source, manifest, held)

        def check(name: str, piece: int, begin: int, end: int) -> None:
            if checksum(read_bytes(held[name], begin, end)) != manifest.tensors[name].checksums[piece]:
                raise CheckpointError(f"{source} is damaged: {name} does not have its checksum.")

        with ThreadPoolExecutor(_THREADS) as pool:
            every = [
                pool.submit(check, name, piece, *span)
                for name, tensor in held.items()
                for piece, span in enumerate(pieces(tensor.end - tensor.begin))
            ]
            for one in every:
                one.result()

    def _take_delta(self, source: Path, manifest: Manifest) -> None:
        held = stored_tensors(self.model)
        _require(source, manifest, held)
        files = {file for changed in manifest.changed.values() for file in changed.values()}
        packed = {file: read_header(source / file) for file in files}

        def change(name: str, piece: int, file: str) -> None:
            tensor, state = held[name], manifest.tensors[name]
            begin, end = pieces(tensor.end - tensor.begin)[piece]
            try:
                change = packed[file][piece_name(name, piece)]
                new = unpack(
                    read_bytes(tensor, begin, end),
                    read_bytes(change, 0, change.end - change.begin).tobytes(),
                    state.itemsize,
                )
            except (KeyError, ValueError, OSError) as error:
                raise CheckpointError(f"{source / file} is damaged at {name}: {error}.") from error
            if checksum(new) != state.checksums[piece]:
                raise CheckpointError(
                    f"{source / file} is not applied: {name} would not have its checksum. It is damaged, or the copy"
                    f" in {self._folder} is."
                )
            with tensor.path.open("r+b", buffering=0) as opened:
                written, view = 0, new.data
                while written < len(view):
                    written += os.pwrite(opened.fileno(), view[written:], tensor.begin + begin + written)

        with ThreadPoolExecutor(_THREADS) as pool:
            every = [
                pool.submit(change, name, int(piece), file)
                for name, of_pieces in manifest.changed.items()
                for piece, file in of_pieces.items()
            ]
            for one in every:
                one.result()


def read_bytes(tensor: StoredTensor, begin: int, end: int) -> Bytes:
    """Bytes of a stored tensor. Raises `OSError`, also if the file has become shorter."""
    data = np.empty(end - begin, np.uint8)
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.begin + begin)
        view, place = data.data, 0
        while place < len(view):
            if not (count := file.readinto(view[place:])):
                raise OSError(None, f"{tensor.path} is truncated")
            place += count
    return data


def state_of(tensor: StoredTensor, checksums: list[str]) -> TensorState:
    """A stored tensor as manifests describe it."""
    numbers = int(np.prod(tensor.shape, dtype=np.int64))
    itemsize = (tensor.end - tensor.begin) // numbers if numbers else 1
    return TensorState(tensor.dtype, list(tensor.shape), itemsize, checksums)


def other_files(folder: Path) -> dict[str, str]:
    """The files of a model folder that hold no weights, and their checksums."""
    files = (path for path in folder.iterdir() if path.is_file() and path.suffix != ".safetensors")
    return {path.name: checksum(path.read_bytes()) for path in files if path.name != MANIFEST}


def _require(source: Path, manifest: Manifest, held: dict[str, StoredTensor]) -> None:
    if not same_tensors(manifest.tensors, {name: state_of(tensor, []) for name, tensor in held.items()}):
        raise CheckpointError(f"{source} is of another model than its files: names, types or shapes differ.")
