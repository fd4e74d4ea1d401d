"""Weights through a Hugging Face folder on a disk that trainer and engines share."""

from __future__ import annotations

import shutil
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.engine.control import EngineControl
from slime.errors import CheckpointError, WeightSyncError, disk_problem
from slime.plugin.architecture import Architecture
from slime.weights.hf_save import Written, save_hf, write_part
from slime.weights.shards import NamedTensors
from slime.weights.transports.transport import Fleet, WeightTransport


@dataclass(kw_only=True, eq=False)
class FolderTransport(WeightTransport):
    """Writes a folder for each version, all senders at the same time; then the engines load.

    Attributes:
        folder: Where versions are written, the same for all senders.
        source_folder: The model folder that configuration and tokenizer are copied from.
        model: The model.
    """

    folder: Path
    source_folder: Path
    model: Architecture

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Errors of the body are those of the sync."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            problem = disk_problem(error, self.folder) if isinstance(error, OSError) else error
            raise WeightSyncError(f"Weight sync: saving failed: {problem}") from error

    def _with_others(self, work: Path, version: str, base: str | None = None) -> Iterator[Any]:
        """Of the first sender: tell the others to write, and return an iterator over their reports.

        Write this sender's part before iterating, which waits for the others. Arguments as of `_write_stage`.
        """
        began = time.monotonic()
        if self.turns is not None:
            told = {"work": str(work), "version": version, "base": base}
            self.turns.begin_together(began + self.timeout_s, told)

        def reports() -> Iterator[Any]:
            self._shares[0] = self._sent, time.monotonic() - began
            if self.turns is not None:
                yield from self._taken(self.turns.others(began + self.timeout_s))

        return reports()

    def _send_part(self, fleet: Fleet, named: NamedTensors, version: str) -> tuple[float, Any]:  # noqa: ARG002
        """See `WeightTransport._send_part`."""
        assert self.turns is not None
        _, told = self.turns.wait(fleet.deadline)
        began = time.monotonic()
        with self._saving():
            work = Path(told["work"])
            if not work.is_dir():
                raise CheckpointError(
                    f"{work} is not there: {self.folder} is not on a disk that all nodes of the trainer share, or the"
                    " first stage's sender has failed."
                )
            report = self._write_stage(work, named, told["version"], told["base"])
        return time.monotonic() - began, report

    @abstractmethod
    def _write_stage(self, work: Path, named: NamedTensors, version: str, base: str | None) -> Any:
        """Of a sender other than the first: write its part of a version into its folder; its report.

        Args:
            work: The folder, which has not got its name yet.
            named: This sender's tensors.
            version: Name of the version.
            base: Name of the version that a delta builds on; None: the version is whole.
        """

    def _load(self, fleet: Fleet, path_of: Callable[[EngineControl], Path], version: str) -> None:
        """Have the paused engines load their model folders."""
        fleet.each(
            "loading from disk",
            lambda engine: engine.update_weights(
                "disk",
                model_path=str(path_of(engine)),
                load_format="auto",  # not as the engine started, which may be without weights
                version=version,
                flush=not self.keep_kv,
                timeout_s=fleet.remaining_s(),
            ),
        )

    def _remove_all_but(self, names: Collection[str]) -> None:
        """Remove versions that no engine will ask for, and what a sender left that was killed or told to stop."""
        for path in self.folder.iterdir():
            if path.name.lstrip(".").startswith("version-") and path.name not in names:
                shutil.rmtree(path, ignore_errors=True)


@dataclass(kw_only=True, eq=False)
class DiskTransport(FolderTransport):
    """Saves a model folder for each version; the engines keep generating until it is complete.

    The newest stays, because engines remember it as their model's path.
    """

    def _update(self, named: NamedTensors, version: str) -> None:
        path = (self.folder / f"version-{version}").resolve()

        def others(work: Path) -> Iterator[Written]:
            return map(as_written, self._with_others(work, path.name))

        with self._saving():
            save_hf(path, named, self.source_folder, self.model, others=others)
        with self._paused(session=False) as fleet:
            self._load(fleet, lambda _: path, version)
        self._remove_all_but([path.name])

    def _write_stage(self, work: Path, named: NamedTensors, *_: object) -> Any:
        return as_report(write_part(work, named, self.source_folder, self.model, writer=self.stage))


def as_report(written: Written) -> Any:
    """What a sender has written, in a form that can be reported."""
    return {
        file: [(name, size, str(dtype).removeprefix("torch.")) for name, size, dtype in tensors]
        for file, tensors in written.items()
    }


def as_written(report: Any) -> Written:
    """What another sender has reported as written."""
    return {
        file: [(name, size, getattr(torch, dtype)) for name, size, dtype in tensors] for file, tensors in report.items()
    }
