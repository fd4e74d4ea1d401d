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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.engine.control import EngineControl
from slime.errors import CheckpointError
from slime.weights.deltas import Bytes, DeltaFiles, Manifest, TensorState, checksum, pack, pieces
from slime.weights.hf_save import saved_tensors, write_part
from slime.weights.local_copy import other_files, state_of
from slime.weights.shards import NamedTensors
from slime.weights.stored import StoredTensor, read_header
from slime.weights.transports.disk import DiskTransport
from slime.weights.transports.transport import Fleet

#: (URL of an engine, folder of all versions, name of a version, seconds) -> the engine's copy, which is this version.
#: Called from several threads.
Receive = Callable[[str, Path, str, float], Path]

_THREADS = min(8, os.cpu_count() or 1)


@dataclass(kw_only=True, eq=False)
class DeltaTransport(DiskTransport):
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
        chain = [] if self._newest is None else self._newest.chain
        base = chain[-1] if 0 < len(chain) < self.full_every else None
        name = f"version-{self._number:06}-{secrets.token_hex(4)}"  # which no version of another run has
        try:
            self._write(named, name, base)
            self._number += 1
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
        with closing(Fleet(self.engines, self.timeout_s)) as ahead:  # while they generate
            copies = ahead.each(
                "applying the new version to the copy",
                lambda engine: (engine, self.receive(engine.url, self.folder, name, ahead.remaining_s())),
            )
        with self._paused(session=False) as fleet:
            fleet.deadline = ahead.deadline
            self._load(fleet, dict(copies).__getitem__, version)

    def _write_part(self, work: Path, named: NamedTensors, name: str, base: str | None) -> Any:
        """See `DiskTransport._write_part`."""
        newest, self._newest = self._newest, None  # if this fails, nobody knows what it holds
        report: dict[str, Any]
        if base is None:
            newest = _Newest()  # the other's space is free now
            parts = write_part(work, named, self.source_folder, self.model, writer=self.stage, see=newest.add)
            newest.describe({tensor: held for file in parts for tensor, held in read_header(work / file).items()})
            report = {"written": parts}
        else:
            if newest is None or newest.chain[-1] != base:
                raise CheckpointError(f"this sender does not hold version {base}, on which {name} builds.")
            report = self._compared(work, named, newest, name)
        newest.chain.append(name)
        self._newest = newest
        return report | {"states": {tensor: asdict(state) for tensor, state in newest.tensors.items()}}

    def _complete(self, work: Path, name: str, base: str | None, reports: Sequence[Any]) -> None:
        """See `DiskTransport._complete`."""
        states = {tensor: TensorState(**fields) for report in reports for tensor, fields in report["states"].items()}
        changed: dict[str, dict[str, str]] = {}
        if base is None:
            super()._complete(work, name, base, reports)
            self._changed = 1.0
        else:
            changed = {tensor: places for report in reports for tensor, places in report["changed"].items()}
            numbers, all_numbers = (sum(report[key] for report in reports) for key in ("changed_numbers", "numbers"))
            self._changed = numbers / max(1, all_numbers)
        Manifest(name, base, states, changed, other_files(work) if base is None else {}).write(work)
        self._bytes = sum(path.stat().st_size for path in work.iterdir())

    def _compared(self, work: Path, named: NamedTensors, newest: _Newest, version: str) -> dict[str, Any]:
        """Write what changed of this sender's tensors from `newest`, which becomes this version; the report of it.

        It has the places of the pieces that changed; how many numbers changed, and of how many.
        """
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
        return {"changed": files.changed, "changed_numbers": changed, "numbers": numbers}


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
        self.tensors = {name: state_of(stored[name], sums) for name, sums in self._sums.items()}

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
