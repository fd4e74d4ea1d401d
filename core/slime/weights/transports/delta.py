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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.engine.control import EngineControl
from slime.errors import CheckpointError, CheckpointWriteError, disk_problem
from slime.weights.deltas import Bytes, DeltaFiles, Manifest, TensorState, checksum, pack, pieces
from slime.weights.hf_save import Written, save_hf, saved_tensors, write_part
from slime.weights.local_copy import other_files, state_of
from slime.weights.shards import NamedTensors
from slime.weights.stored import StoredTensor, read_header, stored_tensors
from slime.weights.transports.disk import FolderTransport, as_report, as_written
from slime.weights.transports.transport import Fleet

#: (URL of an engine, folder of all versions, name of a version, seconds) -> the engine's copy, which is this version.
#: Called from several threads.
Receive = Callable[[str, Path, str, float], Path]

_THREADS = min(8, os.cpu_count() or 1)


@dataclass(kw_only=True, eq=False)
class DeltaTransport(FolderTransport):
    """Writes a version for each sync: a whole one at first and every `full_every`, otherwise a delta.

    The newest whole one and the deltas after it stay, for an engine that has none of them. Each sender compares its own
    tensors with those of the version before; the first decides what the next one is, and writes the manifest.

    Attributes:
        full_every: Every so many versions is whole.
        receive: Brings the copy of an engine to a version.
    """

    full_every: int
    receive: Receive
    #: what the newest version holds of this sender, with which the next is compared; None: the next is whole
    _newest: _Newest | None = field(default=None, init=False)
    _number: int = field(default=0, init=False)
    #: of the newest version, on the disk
    _bytes: int = field(default=0, init=False)
    _changed: float = field(default=1.0, init=False)

    def send(self, named: NamedTensors, *, version: str) -> dict[str, float]:
        """See `WeightTransport.send`. `synced_bytes` are those of the version on the disk."""
        if not (metrics := super().send(named, version=version)):
            return {}
        return metrics | {"synced_bytes": float(self._bytes), "perf/sync/changed_share": self._changed}

    def _update(self, named: NamedTensors, version: str) -> None:
        try:
            with self._saving():
                name = self._write(named)
            self._load_copies(name, version)
        except BaseException:
            self._newest = None  # what is on the disk may be damaged, or another sender's memory
            raise
        assert self._newest is not None
        self._remove_all_but(self._newest.chain)

    def connect(self, engines: Sequence[EngineControl]) -> None:
        """See `WeightTransport.connect`. A new engine needs no whole version: the newest one is still there."""
        self.engines = engines

    def close(self) -> None:
        """Remove the versions, and what the next would be compared with."""
        for name in [] if self._newest is None or self.stage else self._newest.chain:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self._newest = None

    def _load_copies(self, name: str, version: str) -> None:
        ahead = Fleet(self.engines, self.timeout_s)
        try:  # while they generate
            copies = ahead.each(
                "applying the new version to the copy",
                lambda engine: (engine, self.receive(engine.url, self.folder, name, ahead.remaining_s())),
            )
        finally:
            ahead.close()
        with self._paused(session=False) as fleet:
            fleet.deadline = ahead.deadline
            self._load(fleet, dict(copies).__getitem__, version)

    def _write(self, named: NamedTensors) -> str:
        """Of the first sender: write the next version; its name, which no version of another sender has."""
        name = f"version-{self._number:06}-{secrets.token_hex(4)}"
        self.folder = self.folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._newest is None or len(self._newest.chain) >= self.full_every:
            self._write_whole(name, named)
        else:
            self._write_delta(name, named, self._newest.chain[-1])
        self._number += 1
        return name

    def _write_whole(self, name: str, named: NamedTensors) -> None:
        self._newest = None  # frees its space
        newest = _Newest()
        states: dict[str, TensorState] = {}

        def taken(report: Mapping[str, Any]) -> Written:
            states.update(_states(report["states"]))
            return as_written(report["written"])

        def describe(work: Path) -> None:
            newest.describe(stored_tensors(work))
            Manifest(name, None, newest.tensors | states, {}, other_files(work)).write(work)
            self._bytes = _size(work)

        save_hf(
            self.folder / name,
            named,
            self.source_folder,
            self.model,
            others=lambda work: map(taken, self._with_others(work, name)),  # they begin before this one
            see=newest.add,
            also=describe,
        )
        newest.chain, self._newest, self._changed = [name], newest, 1.0

    def _write_delta(self, name: str, named: NamedTensors, base: str) -> None:
        with _appearing(self.folder / name) as work:
            theirs = self._with_others(work, name, base)
            newest, files, counts = self._compared(work, named, name, base)
            states, changed = dict(newest.tensors), files.changed
            for report in theirs:
                states |= _states(report["states"])
                changed |= report["changed"]
                counts = counts[0] + report["counts"][0], counts[1] + report["counts"][1]
            Manifest(name, base, states, changed, {}).write(work)
            self._bytes = _size(work)
        self._changed = counts[0] / max(1, counts[1])

    def _write_stage(self, work: Path, named: NamedTensors, version: str, base: str | None) -> Any:
        report: dict[str, Any]
        if base is None:
            self._newest = None  # frees its space
            newest = _Newest()
            parts = write_part(work, named, self.source_folder, self.model, writer=self.stage, see=newest.add)
            for file in parts:
                newest.describe(read_header(work / file))
            newest.chain, self._newest, report = [version], newest, {"written": as_report(parts)}
        else:
            newest, files, counts = self._compared(work, named, version, base)
            report = {"changed": files.changed, "counts": counts}
        return report | {"states": {tensor: asdict(state) for tensor, state in newest.tensors.items()}}

    def _compared(
        self, work: Path, named: NamedTensors, version: str, base: str
    ) -> tuple[_Newest, DeltaFiles, tuple[int, int]]:
        """Write what changed of this sender's tensors from version `base` to `version`.

        Returns:
            What it holds now; the files; how many numbers changed, and of how many.
        """
        newest, self._newest = self._newest, None  # if this fails, nobody knows what it holds
        if newest is None or newest.chain[-1] != base:
            raise CheckpointError(f"this sender does not hold version {base}, on which {version} builds.")
        numbers = changed = 0
        files = DeltaFiles(work, self.stage)
        saved = saved_tensors(self.folder / version, named, self.source_folder, self.model, newest.tensors)
        with ThreadPoolExecutor(_THREADS) as pool:
            for tensor, value in saved:
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
        newest.chain.append(version)
        self._newest = newest
        return newest, files, (changed, numbers)


class _Newest:
    """The newest version: its tensors, in a file without a name, which vanishes with this process."""

    def __init__(self) -> None:
        """Holds nothing yet."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this object
        weakref.finalize(self, self._file.close)
        self._place: dict[str, int] = {}
        self._end = 0
        self._sums: dict[str, list[str]] = {}
        self.tensors: dict[str, TensorState] = {}
        #: names of the versions: a whole one and the deltas after it
        self.chain: list[str] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor."""
        data = _bytes_of(tensor)
        self._place[name] = self._end
        self._sums[name] = [checksum(data[begin:end]) for begin, end in pieces(data.size)]
        self._write(data, self._end)
        self._end += data.size

    def describe(self, stored: Mapping[str, StoredTensor]) -> None:
        """Take types and shapes of its tensors from the files into which they were written."""
        found = {name: state_of(stored[name], sums) for name, sums in self._sums.items() if name in stored}
        self.tensors |= found

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


def _states(reported: Mapping[str, Any]) -> dict[str, TensorState]:
    return {name: TensorState(**fields) for name, fields in reported.items()}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


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
