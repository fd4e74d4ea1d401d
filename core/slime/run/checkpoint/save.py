"""Saves the state of all processes of a run as one checkpoint, while training waits or in the background."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config import RunConfig
from slime.errors import CheckpointError, disk_problem
from slime.observe.timing import timed
from slime.plugin.architecture import Architecture
from slime.run.checkpoint.files import (
    LATEST,
    Files,
    digest_of_json,
    make_folder,
    point_latest,
    record_files,
    sync_folder,
    sync_folders,
    write_text,
    writing_checkpoint,
)
from slime.run.checkpoint.read import (
    CONFIG,
    FORMAT,
    PLUGINS,
    ROLLOUT_PART,
    STATE,
    TRAINER_PART,
    checkpoints_in,
    data_order,
    describe_model,
    number_of,
    read_checkpoint,
    standing,
)
from slime.run.checkpoint.retention import Retention
from slime.run.remote_trainer import TrainerProcess
from slime.run.rollout_process import RolloutProcess
from slime.weights.models import Models

if TYPE_CHECKING:
    from slime.observe.observer import RunObserver
    from slime.registry.plugin_set import PluginSet
    from slime.run.workers import Workers

logger = logging.getLogger(__name__)

#: seconds that the end of a run waits for files to be deleted
_DELETE_S = 30.0
#: seconds between two questions to the ranks whether they have written their shares
_ASK_S = 1.0


class CheckpointWriter:
    """Writes checkpoints to the folder of `--save`, and deletes those that are no longer kept."""

    def __init__(
        self, root: Path, config: RunConfig, plugins: dict[str, Any], model: Architecture | None = None
    ) -> None:
        """Read the prompt files, whose content is saved as a digest.

        Args:
            root: The folder of `--save`.
            config: The run.
            plugins: The plugins that it uses.
            model: The model that it trains, if a folder describes it.

        Raises:
            DataError: A prompt file cannot be read.
        """
        self._root = root
        self._config = config
        self._plugins = plugins
        self._data_order = data_order(config)
        self._model = None if model is None else describe_model(model)
        #: whose weights the run starts from, and reads again whenever it is continued
        self._initial: Path | None = None
        if (initial := config.checkpoint.initial_megatron_checkpoint) is not None:
            with suppress(CheckpointError):  # the run will report it
                self._initial = read_checkpoint(Path(initial)).path.resolve()
        self._deleting: list[threading.Thread] = []
        self._being_deleted: set[Path] = set()

    def begin(self, rollouts_done: int) -> Path:
        """Make a temporary folder for the parts of trainer ranks and rollout process. Raises `CheckpointError`.

        Deletes those that a killed run left: each may be as large as a checkpoint.
        """
        temporary = self._partial(rollouts_done)
        if temporary in self._being_deleted:
            self.close()
        with writing_checkpoint(temporary):
            replaced = [path for path in self._root.glob(".rollout_*.replaced") if _is_replaced(path)]
            for left in {*self._root.glob(".rollout_*.partial"), *replaced} - self._being_deleted:
                shutil.rmtree(left, ignore_errors=True)
            make_folder(temporary / TRAINER_PART)
        return temporary

    def commit(
        self,
        temporary: Path,
        files: Files,
        *,
        rollouts_done: int,
        weight_version: int,
        trained_at: Mapping[int, int],
    ) -> Path:
        """Complete the checkpoint, rename the folder to its final name and point `latest` at it.

        Args:
            temporary: The folder that `begin` made, with both parts in it.
            files: Records of the files that were hashed and flushed where they were written; the others are here.
            rollouts_done: How many rollouts have been trained on.
            weight_version: The engines' current weight version.
            trained_at: Weight version -> rollouts that had been trained on when the engines got it.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: It cannot be written; `latest` still names the previous checkpoint.
        """
        state = {
            "format": FORMAT,
            "rollouts_done": rollouts_done,
            "weight_version": weight_version,
            "trained_at": list(trained_at.items()),
            "data_order": self._data_order,
            "model": self._model,
        }
        final = self._final(rollouts_done)
        with writing_checkpoint(final):
            write_text(temporary / PLUGINS, [json.dumps(self._plugins, indent=1)])
            write_text(temporary / CONFIG, [self._config.to_toml()])
            others = [path for path in temporary.rglob("*") if path.is_file()]
            known = {temporary / name for name in files}
            state["files"] = {**files, **record_files(temporary, set(others) - known)}
            state["sha256"] = digest_of_json(json.loads(json.dumps(state)))
            write_text(temporary / STATE, [json.dumps(state, indent=1)])
            sync_folders(temporary)
            # The one of this number is moved first, because deleting it takes time. If it is already aside, where a
            # killed run left it, it stays until `latest` names the new one.
            replaced = self._root / f".{final.name}.replaced"
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)
            try:
                temporary.rename(final)
            except OSError:
                if replaced.exists():
                    replaced.rename(final)
                raise
            sync_folder(self._root)
            point_latest(self._root, final.name)
        if replaced.exists():
            self._delete_in_background([replaced])
        return final

    def discard(self, temporary: Path) -> None:
        """Delete what `begin` made, after an error: on a full disk it would take the place of logs."""
        shutil.rmtree(temporary, ignore_errors=True)

    def saved(self) -> list[int]:
        """The checkpoints in the folder, by their numbers of rollouts done."""
        numbers = (number_of(path.name) for path in checkpoints_in(self._root))
        # A link is not the run's: somebody keeps something there.
        return [number for number in numbers if (path := standing(self._final(number))) and not path.is_symlink()]

    def delete(self, numbers: Iterable[int]) -> None:
        """Delete checkpoints: they lose their names now, and their files in a thread.

        One that `latest` names stays, and so does one whose weights the run starts from whenever it is continued. What
        cannot be deleted is reported, and stays too.
        """
        aside: list[Path] = []
        try:
            needed = {read_checkpoint(self._root).path.resolve(), self._initial}
            for number in numbers:
                path = standing(self._final(number))
                if path is not None and path.resolve() not in needed:
                    path.rename(self._partial(number))
                    aside.append(self._partial(number))
        except (OSError, CheckpointError) as error:
            reason = disk_problem(error, self._root / LATEST)
            logger.warning("checkpoints in %s that are no longer kept cannot be deleted: %s", self._root, reason)
        if aside:
            logger.info("deleting from %s: %s", self._root, ", ".join(path.name[1:-8] for path in aside))
            self._delete_in_background(aside)

    def _delete_in_background(self, aside: Sequence[Path]) -> None:
        """Delete folders that have lost their names, in a thread."""
        self._being_deleted.update(aside)
        thread = threading.Thread(target=self._delete, args=(aside,), name="delete-checkpoints", daemon=True)
        self._deleting = [*(one for one in self._deleting if one.is_alive()), thread]
        thread.start()

    def _delete(self, folders: Iterable[Path]) -> None:
        with suppress(OSError):  # a later `begin` tries again
            sync_folder(self._root)  # a half deleted checkpoint must not have its name back after a power failure
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
        self._being_deleted.difference_update(folders)

    def close(self) -> None:
        """Wait until the files are deleted, for `_DELETE_S` seconds at most."""
        deadline = time.monotonic() + _DELETE_S
        for thread in self._deleting:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _final(self, rollouts_done: int) -> Path:
        return self._root / f"rollout_{rollouts_done:06d}"

    def _partial(self, rollouts_done: int) -> Path:
        return self._root / f".rollout_{rollouts_done:06d}.partial"


def _is_replaced(aside: Path) -> bool:
    """Whether the checkpoint that was moved aside has a complete successor."""
    return (aside.with_name(aside.name.removeprefix(".").removesuffix(".replaced")) / STATE).exists()


# --- a run's checkpoints ----------------------------------------------------------------------------


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
    of_ranks = trainer.begin(TrainerProcess.save_model, folder, part, doing=f"saving {part}").wait()
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
        self._trainer.begin(TrainerProcess.begin_save, folder, part, background, doing=f"saving {part}").wait()
        self._rollout.begin(
            RolloutProcess.save, folder / ROLLOUT_PART, rollouts_done, doing="saving the rollout state"
        ).wait()
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
        of_ranks = self._trainer.begin(TrainerProcess.finish_save, doing=f"saving {one.trainer_part}").wait()
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
        return all(self._trainer.begin(TrainerProcess.written, doing=f"saving {one.trainer_part}").wait())

    def close(self) -> None:
        """Delete the checkpoint that is being written, after an error or Ctrl-C; no rank may write to it any more.

        Waits until the checkpoints are deleted that are no longer kept; that wait has a deadline.
        """
        if self._unfinished is not None:
            self._writer.discard(self._unfinished.folder)
            self._unfinished = None
        self._writer.close()

    def training_waits(self) -> AbstractContextManager[None]:
        """Count the seconds of the body: training stands still for a checkpoint."""
        return timed(self._seconds, "time/save")

    def take_seconds(self) -> dict[str, float]:
        """The metrics of saving since the last call.

        `time/save`: seconds for which training stood still; `time/save_background`: seconds from the beginning of the
        last checkpoint written in the background until it was complete.
        """
        seconds, self._seconds = self._seconds, {}
        return seconds
