"""Weights through a shared disk, of which only what changed is written and read.

Each engine has a copy of the weights on a disk of its own node. The process beside it applies a version to the copy
while the engine still generates, and the engine then loads the copy as any model.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slime.engine.control import EngineControl
from slime.errors import CheckpointError, CheckpointWriteError, WeightSyncError, disk_problem
from slime.plugin.architecture import Architecture
from slime.weights.deltas import Bytes, DeltaFiles, Manifest, TensorState, checksum, pack, pieces
from slime.weights.hf_save import save_hf, saved_tensors
from slime.weights.local_copy import other_files, read_bytes, state_of
from slime.weights.shards import NamedTensors
from slime.weights.stored import stored_tensors
from slime.weights.transports.transport import Fleet, WeightTransport

#: (URL of an engine, folder of all versions, name of a version, seconds) -> the engine's copy, which is this version.
#: Called from several threads.
Receive = Callable[[str, Path, str, float], Path]

_THREADS = min(8, os.cpu_count() or 1)


@dataclass(kw_only=True, eq=False)
class DeltaTransport(WeightTransport):
    """Writes a version for each sync: a whole one at first and every `full_every`, otherwise a delta.

    The newest whole one and the deltas after it stay, for an engine that has none of them.

    Attributes:
        folder: Where versions are written.
        source_folder: The model folder that configuration and tokenizer are copied from.
        model: The model.
        full_every: Every so many versions is whole.
        receive: Brings the copy of an engine to a version.
    """

    folder: Path
    source_folder: Path
    model: Architecture
    full_every: int
    receive: Receive
    #: what the newest version holds, with which the next is compared; None: the next is whole
    _newest: _Newest | None = field(default=None, init=False)
    _number: int = field(default=0, init=False)
    #: of the newest version, on the disk
    _bytes: int = field(default=0, init=False)
    _changed: float = field(default=1.0, init=False)

    def send(self, named: NamedTensors, *, version: str) -> dict[str, float]:
        """See `WeightTransport.send`. `synced_bytes` are those of the version on the disk."""
        super().send(named, version=version)
        return {"synced_bytes": float(self._bytes), "perf/sync/changed_share": self._changed}

    def _update(self, named: NamedTensors, version: str) -> None:
        try:
            name = self._write(named)
        except (CheckpointError, OSError) as error:
            self._newest = None
            problem = disk_problem(error, self.folder) if isinstance(error, OSError) else error
            raise WeightSyncError(f"Weight sync: saving failed: {problem}") from error
        try:
            self._load(name, version)
        except BaseException:
            self._newest = None  # what is on the disk may be damaged
            raise
        assert self._newest is not None
        for path in self.folder.iterdir():  # those that no engine will ask for, and what a killed sender left
            if path.name.lstrip(".").startswith("version-") and path.name not in self._newest.chain:
                shutil.rmtree(path, ignore_errors=True)

    def connect(self, engines: Sequence[EngineControl]) -> None:
        """See `WeightTransport.connect`. A new engine needs no whole version: the newest one is still there."""
        self.engines = engines

    def close(self) -> None:
        """Remove the versions, and what the next would be compared with."""
        for name in [] if self._newest is None else self._newest.chain:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self._newest = None

    def _load(self, name: str, version: str) -> None:
        ahead = Fleet(self.engines, self.timeout_s)
        try:  # while they generate
            copies = ahead.each(
                "applying the new version to the copy",
                lambda engine: (engine, self.receive(engine.url, self.folder, name, ahead.remaining_s())),
            )
        finally:
            ahead.close()
        path_of = dict(copies)
        with self._paused(session=False) as fleet:
            fleet.deadline = ahead.deadline
            fleet.each(
                "loading from disk",
                lambda engine: engine.update_weights(
                    "disk",
                    model_path=str(path_of[engine]),
                    load_format="auto",
                    version=version,
                    flush=not self.keep_kv,
                    timeout_s=fleet.remaining_s(),
                ),
            )

    def _write(self, named: NamedTensors) -> str:
        """Write the next version; its name, which no version of another sender has."""
        name = f"version-{self._number:06}-{secrets.token_hex(4)}"
        self.folder = self.folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._newest is None or len(self._newest.chain) >= self.full_every:
            self._newest = None  # frees its space
            self._newest = self._write_whole(name, named)
        else:
            newest, self._newest = self._newest, None
            self._newest = self._write_delta(name, named, newest)
        self._number += 1
        return name

    def _write_whole(self, name: str, named: NamedTensors) -> _Newest:
        newest = _Newest()

        def describe(work: Path) -> None:
            for tensor, stored in stored_tensors(work).items():
                spans = pieces(stored.end - stored.begin)
                sums = [newest.add(tensor, read_bytes(stored, begin, end)) for begin, end in spans]
                newest.tensors[tensor] = state_of(stored, sums)
            Manifest(name, None, newest.tensors, {}, other_files(work)).write(work)
            self._bytes = sum(path.stat().st_size for path in work.iterdir())

        save_hf(self.folder / name, named, self.source_folder, self.model, also=describe)
        newest.chain, self._changed = [name], 1.0
        return newest

    def _write_delta(self, name: str, named: NamedTensors, newest: _Newest) -> _Newest:
        numbers = changed = 0
        with _appearing(self.folder / name) as work, ThreadPoolExecutor(_THREADS) as pool:
            files = DeltaFiles(work)
            for tensor, value in saved_tensors(self.folder / name, named, self.source_folder, self.model):
                new, itemsize = _bytes_of(value), value.element_size()
                numbers += value.numel()
                state = newest.tensors.get(tensor)
                if state is None or list(value.shape) != state.shape or itemsize != state.itemsize:
                    raise CheckpointError(f"{tensor} has another shape or type than in the version before.")
                compare = partial(newest.replace, tensor, new, itemsize)
                for piece, (sum_, found) in enumerate(pool.map(compare, pieces(new.size))):
                    if found is not None:
                        state.checksums[piece] = sum_
                        files.add(tensor, piece, found[0])
                        changed += found[1]
            files.flush()
            Manifest(name, newest.chain[-1], newest.tensors, files.changed, {}).write(work)
            self._bytes = sum(path.stat().st_size for path in work.iterdir())
        newest.chain.append(name)
        self._changed = changed / max(1, numbers)
        return newest


class _Newest:
    """The newest version: its tensors, in a file without a name, which vanishes with this process."""

    def __init__(self) -> None:
        """Holds nothing yet."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this object
        weakref.finalize(self, self._file.close)
        self._place: dict[str, int] = {}
        self._end = 0
        self.tensors: dict[str, TensorState] = {}
        #: names of the versions: a whole one and the deltas after it
        self.chain: list[str] = []

    def add(self, name: str, piece: Bytes) -> str:
        """Add the next piece of a tensor; its checksum."""
        self._place.setdefault(name, self._end)
        self._write(piece, self._end)
        self._end += piece.size
        return checksum(piece)

    def replace(
        self, name: str, new: Bytes, itemsize: int, span: tuple[int, int]
    ) -> tuple[str, tuple[bytes, int] | None]:
        """Put new bytes in the place of a piece: their checksum, and the packed change and its numbers if it changed.

        Called from several threads.
        """
        begin, end = span
        place, piece = self._place[name] + begin, new[begin:end]
        old = np.frombuffer(os.pread(self._file.fileno(), end - begin, place), np.uint8)
        if old.size != piece.size:
            raise OSError(None, "the file with the weights of the version before was truncated")
        if np.array_equal(old, piece):
            return "", None
        self._write(piece, place)
        numbers = int(np.count_nonzero(old.view(f"u{itemsize}") != piece.view(f"u{itemsize}")))
        return checksum(piece), (pack(old, piece, itemsize), numbers)

    def _write(self, piece: Bytes, place: int) -> None:
        view, written = piece.data, 0
        while written < len(view):
            written += os.pwrite(self._file.fileno(), view[written:], place + written)


def _bytes_of(tensor: Tensor) -> Bytes:
    """The bytes of a tensor, in host memory."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    data: Bytes = flat.view(torch.uint8).numpy()
    return data


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A folder that gets its name when the body has filled it, and is removed if the body fails."""
    work = folder.parent / f".{folder.name}"
    work.mkdir()
    try:
        yield work
        work.rename(folder)
    except OSError as error:
        raise CheckpointWriteError(f"{folder} cannot be written: {disk_problem(error, folder)}.") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
