"""Saves the state of all processes of a run as one checkpoint, while training waits or in the background."""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slime.config import RunConfig
from slime.observe.observer import RunObserver
from slime.registry.plugin_set import PluginSet
from slime.run.checkpoint import ROLLOUT_PART, TRAINER_PART
from slime.run.checkpoint_writer import CheckpointWriter
from slime.run.processes import RolloutProcess, TrainerProcess
from slime.run.retention import Retention
from slime.run.workers import Workers
from slime.weights import Models

#: seconds between two questions to the ranks whether they have written their shares
_ASK_S = 1.0


@dataclass(frozen=True)
class _Unfinished:
    """A checkpoint that is being written."""

    folder: Path
    rollouts_done: int
    weight_version: int
    trained_at: Mapping[int, int]
    background: bool
    begun: float

    @property
    def trainer_part(self) -> Path:
        return self.folder / TRAINER_PART


def writer_for(root: Path, config: RunConfig, plugins: PluginSet, run_dir: Path) -> CheckpointWriter:
    """What writes the checkpoints of a run to `root`. Raises `DataError` if a prompt file cannot be read."""
    folder = config.checkpoint.hf_checkpoint
    model = None if folder is None else Models(plugins, config, run_dir).read(Path(folder))
    return CheckpointWriter(root, config, plugins.provenance(config), model)


def save_model(writer: CheckpointWriter, trainer: Workers) -> None:
    """Write the ranks' weights alone as a checkpoint before the first rollout. Raises `CheckpointError`."""
    folder = writer.begin(0)
    part = folder / TRAINER_PART
    of_ranks = trainer.call(TrainerProcess.save_model, folder, part, doing=f"saving {part}")
    writer.commit(folder, dict(ChainMap(*of_ranks)), rollouts_done=0, weight_version=0, trained_at={})


class Saver:
    """Writes the checkpoints of one run, one at a time.

    In the background only the ranks' shares are written, which are nearly all of the bytes: from copies, so that
    training may go on. The rollout process writes its part before that: data source, filters and plugins may share with
    the running generation what they return as their state. The checkpoint gets its name when every part is on disk and
    hashed; until then `latest` names the one before. Only then are those deleted that are no longer kept.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        trainer: Workers,
        rollout: Workers,
        observer: RunObserver,
        retention: Retention,
    ) -> None:
        self._writer, self._trainer, self._rollout, self._observer = writer, trainer, rollout, observer
        self._retention = retention
        self._unfinished: _Unfinished | None = None
        self._asked = 0.0
        self._seconds: dict[str, float] = {}
        #: the newest complete checkpoint that this run has written, and its number of rollouts
        self.newest: Path | None = None
        self.newest_done: int | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._unfinished is not None

    def save(self, rollouts_done: int, weight_version: int, trained_at: Mapping[int, int], *, background: bool) -> None:
        """Write a checkpoint, after waiting for one that is still being written.

        Args:
            rollouts_done: How many rollouts have been trained on.
            weight_version: The engines' current weight version.
            trained_at: Weight version -> rollouts that had been trained on when the engines got it.
            background: Return when the state is copied, and complete the checkpoint in a later call of `finish`.

        Raises:
            CheckpointError: A part cannot be written.
        """
        self.finish()
        begun, folder = time.monotonic(), self._writer.begin(rollouts_done)
        one = _Unfinished(folder, rollouts_done, weight_version, dict(trained_at), background, begun)
        self._unfinished, part = one, one.trainer_part
        self._trainer.call(TrainerProcess.begin_save, folder, part, background, doing=f"saving {part}")
        self._rollout.call(RolloutProcess.save, folder / ROLLOUT_PART, rollouts_done, doing="saving the rollout state")
        if not background:
            self.finish()

    def finish(self, *, wait: bool = True) -> None:
        """Complete the checkpoint that is being written, if there is one.

        Args:
            wait: Wait for it; otherwise leave it as it is if a rank still writes. The ranks must be idle then.

        Raises:
            CheckpointError: A part could not be written.
        """
        one, began = self._unfinished, time.monotonic()
        if one is None or not (wait or self._written(one)):
            return
        of_ranks = self._trainer.call(TrainerProcess.finish_save, doing=f"saving {one.trainer_part}")
        path = self._writer.commit(
            one.folder,
            dict(ChainMap(*of_ranks)),
            rollouts_done=one.rollouts_done,
            weight_version=one.weight_version,
            trained_at=one.trained_at,
        )
        self._unfinished, self.newest, self.newest_done = None, path, one.rollouts_done
        note = ""
        if one.background:
            now = time.monotonic()
            self._seconds["time/save_background"] = now - one.begun
            note = f"written in {now - one.begun:.1f} s"
            if wait:
                note += f", {now - began:.1f} s of it while training waited for it"
        self._observer.checkpoint_saved(one.rollouts_done, path, note)
        self.delete_superfluous()

    def delete_superfluous(self) -> None:
        """Delete the checkpoints that are no longer kept, if this run has written one; training does not wait."""
        if self.newest_done is not None and not self._retention.keeps_all:
            self._writer.delete(self._retention.superfluous(self._writer.saved(), self.newest_done))

    def _written(self, one: _Unfinished) -> bool:
        """Whether every rank has written its share; asked every `_ASK_S` seconds at most."""
        if time.monotonic() - self._asked < _ASK_S:
            return False
        self._asked = time.monotonic()
        return all(self._trainer.call(TrainerProcess.written, doing=f"saving {one.trainer_part}"))

    def close(self) -> None:
        """Delete the checkpoint that is being written, after an error or Ctrl-C; no rank may write to it any more.

        Waits until the checkpoints are deleted that are no longer kept; that wait has a deadline.
        """
        if self._unfinished is not None:
            self._writer.discard(self._unfinished.folder)
            self._unfinished = None
        self._writer.close()

    @contextmanager
    def training_waits(self) -> Iterator[None]:
        """Count the seconds of the body: training stands still for a checkpoint."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds["time/save"] = self._seconds.get("time/save", 0.0) + time.monotonic() - began

    def take_seconds(self) -> dict[str, float]:
        """The metrics of saving since the last call.

        `time/save`: seconds for which training stood still; `time/save_background`: seconds from the beginning of the
        last checkpoint written in the background until it was complete.
        """
        seconds, self._seconds = self._seconds, {}
        return seconds
