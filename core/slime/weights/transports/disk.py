"""Weights through a Hugging Face folder on a disk that trainer and engines share."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.engine.control import EngineControl
from slime.errors import CheckpointError, WeightSyncError, disk_problem
from slime.plugin.architecture import Architecture
from slime.weights.hf_save import Written, appearing, complete, write_part
from slime.weights.shards import NamedTensors
from slime.weights.transports.transport import Fleet, WeightTransport


@dataclass(kw_only=True, eq=False)
class DiskTransport(WeightTransport):
    """Saves a model folder for each version, all senders at the same time.

    The engines keep generating until it is complete. The newest stays, because they remember it as their model's path.

    Attributes:
        folder: Where versions are written, the same for all senders.
        source_folder: The model folder that configuration and tokenizer are copied from.
        model: The model.
    """

    folder: Path
    source_folder: Path
    model: Architecture

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()  # for processes that run elsewhere

    def _update(self, named: NamedTensors, version: str) -> None:
        name = f"version-{version}"
        self._write(named, name)
        with self._paused(session=False) as fleet:
            self._load(fleet, lambda _: self.folder / name, version)
        self._remove_all_but([name])

    def _write(self, named: NamedTensors, name: str, base: str | None = None) -> None:
        """Of the first sender: have all senders write a version. Arguments as of `_write_part`."""
        began = time.monotonic()
        deadline = began + self.timeout_s
        with self._saving(), appearing(self.folder / name) as work:
            if self.turns is not None:
                self.turns.begin_together(deadline, {"work": str(work), "name": name, "base": base})
            reports = [self._write_part(work, named, name, base)]
            self._shares[0] = self._sent, time.monotonic() - began
            if self.turns is not None:
                reports += self._taken(self.turns.others(deadline))
            self._complete(work, name, base, reports)

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
            report = self._write_part(work, named, told["name"], told["base"])
        return time.monotonic() - began, report

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Errors of the body are those of the sync."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            problem = disk_problem(error, self.folder) if isinstance(error, OSError) else error
            raise WeightSyncError(f"Weight sync: saving failed: {problem}") from error

    def _write_part(self, work: Path, named: NamedTensors, name: str, base: str | None) -> Any:  # noqa: ARG002 - of deltas
        """Write this sender's part of a version into its folder; what the first sender must know of it, as JSON.

        Args:
            work: The folder, which has not got its name yet.
            named: This sender's tensors.
            name: Name of the version.
            base: Name of the version that a delta builds on; None: the version is whole.
        """
        return {"written": write_part(work, named, self.source_folder, self.model, writer=self.stage)}

    def _complete(self, work: Path, name: str, base: str | None, reports: Sequence[Any]) -> None:  # noqa: ARG002
        """Of the first sender, with the reports of all: write what belongs to the whole version."""
        parts: Written = {file: tensors for report in reports for file, tensors in report["written"].items()}
        complete(work, self.folder / name, parts, self.source_folder, self.model)

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
