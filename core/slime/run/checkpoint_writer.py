"""Writes checkpoints, and checks which folders a run may write its results to."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slime.config import RunConfig
from slime.errors import CheckpointError, ConfigError, disk_problem
from slime.plugin.architecture import Architecture
from slime.run.checkpoint import (
    CONFIG,
    FORMAT,
    LATEST,
    PLUGINS,
    STATE,
    TRAINER_PART,
    checkpoints_in,
    data_order,
    describe_model,
    read_checkpoint,
    standing,
)
from slime.run.checkpoint_files import (
    Files,
    digest_of_json,
    make_folder,
    record_files,
    sync_folder,
    sync_folders,
    write_text,
    writing,
)

logger = logging.getLogger(__name__)

#: seconds that the end of a run waits for files to be deleted
_DELETE_S = 30.0


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
        with writing(temporary):
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
        with writing(final):
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
        numbers = (int(path.name.removeprefix("rollout_")) for path in checkpoints_in(self._root))
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


def point_latest(root: Path, name: str) -> None:
    """Let `latest` name a checkpoint that is complete on disk. Raises `OSError`."""
    pointer = root / ".latest.partial"
    write_text(pointer, [name, "\n"])
    pointer.replace(root / LATEST)
    sync_folder(root)


def forget_damaged(config: RunConfig, intact: Path) -> None:
    """Let `latest` name the checkpoint `intact`, if the run goes on saving beside it; the damaged ones stay.

    The run replaces them when it gets there. Until then `latest` would name a damaged one.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    root, save = intact.parent, config.checkpoint.save
    if save is not None and Path(save).resolve() == root.resolve():
        with writing(intact):
            point_latest(root, intact.name)


def require_own_folder(config: RunConfig, run_dir: Path) -> None:
    """Check that the folder of `--save` holds nothing of another run, and no model.

    New checkpoints would reset `latest` and replace those with the same number.

    Args:
        config: The run.
        run_dir: Its folder.

    Raises:
        ConfigError: It holds checkpoints of a run that `config` does not continue; or it is the folder of another run,
            a checkpoint or a model folder.
    """
    if config.checkpoint.save is None:
        return
    root = Path(config.checkpoint.save)
    held = {STATE: "is a checkpoint", "config.json": "is a model folder"}
    if root.resolve() != run_dir.resolve():
        held[CONFIG] = "is the folder of another run"
    for name, what in held.items():
        if (root / name).exists():
            raise ConfigError(f"--save {root} {what} (it has {name}); expected a folder for checkpoints alone.")
    saved = checkpoints_in(root)
    load = config.checkpoint.load
    if not saved or (load is not None and Path(load).resolve() in (root.resolve(), *(one.resolve() for one in saved))):
        return
    raise ConfigError(
        f"--save {root} holds checkpoints of another run, up to {saved[0].name}. Continue that run with --load {root},"
        " or choose another folder."
    )


def require_export_folder(config: RunConfig) -> None:
    """Check that `--save-hf` replaces nothing but an exported model: what is in the folder is deleted.

    A run that exports to a folder for each rollout, and continues no other, replaces nothing.

    Raises:
        ConfigError: It is, holds or lies in a model that the run reads; or it is no model folder and is not empty.
    """
    options = config.checkpoint
    if options.save_hf is None:
        return
    try:
        step = options.save_interval if options.exports_each else None
        exported = {*range(step or config.num_rollout, config.num_rollout, step or 1), config.num_rollout}
        folders = [Path(options.save_hf.format(rollout=done)) for done in sorted(exported)]
    except (KeyError, IndexError, ValueError):
        return  # the checks of the configuration report it
    read = {
        "--hf-checkpoint": options.hf_checkpoint,
        "--ref-load": options.ref_load,
        "--critic-load": config.algorithm.critic_load,
        "--lora-load": config.lora.lora_load,
    }
    for folder in folders:
        _require_free(folder, read)
        if options.exports_each and options.load is None and (folder / "config.json").is_file():
            raise ConfigError(
                f"--save-hf {options.save_hf}: {folder} holds a model already, and this run would replace it."
                f" Choose another folder, or continue the run that exported it with --load."
            )


def _require_free(folder: Path, read: Mapping[str, str | None]) -> None:
    """Check one folder of an export against the models that the run reads, by the flag that names each."""
    place = folder.resolve()
    for option, model in read.items():
        if model is None:
            continue
        source = Path(model).resolve()
        if place == source or place in source.parents or source in place.parents:
            raise ConfigError(
                f"--save-hf {folder} would overwrite {option} {model}: both are {source}"
                if place == source
                else f"--save-hf {folder} and {option} {model} are inside each other: choose another folder"
            )
    if place.exists() and not place.is_dir():
        raise ConfigError(f"--save-hf {folder} is a file; expected a folder to write the model to")
    if place.is_dir() and any(place.iterdir()) and not (place / "config.json").is_file():
        raise ConfigError(
            f"--save-hf {folder} is not empty and holds no model (no config.json); an export replaces the whole folder."
            " Choose a new one."
        )
