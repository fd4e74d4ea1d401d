"""Writes checkpoints, and checks which folders a run may write its results to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.config import RunConfig
from slime.errors import ConfigError
from slime.run.checkpoint import CONFIG, FORMAT, LATEST, PLUGINS, STATE, TRAINER_PART, checkpoints_in, data_order
from slime.run.checkpoint_files import Files, digest_of_json, record_files, write_text, writing


class CheckpointWriter:
    """Writes checkpoints to the folder of `--save`."""

    def __init__(self, root: Path, config: RunConfig, plugins: dict[str, Any]) -> None:
        """Read the prompt files, whose content is saved as a digest. Raises `DataError` if one cannot be read."""
        self._root = root
        self._config = config
        self._plugins = plugins
        self._data_order = data_order(config)

    def begin(self, rollouts_done: int) -> Path:
        """Make a temporary folder for the parts of trainer ranks and rollout process. Raises `CheckpointError`.

        Deletes those that a killed run left: each may be as large as a checkpoint.
        """
        temporary = self._root / f".rollout_{rollouts_done:06d}.partial"
        with writing(temporary):
            for left in self._root.glob(".rollout_*.partial"):
                shutil.rmtree(left, ignore_errors=True)
            (temporary / TRAINER_PART).mkdir(parents=True)
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
            files: Records of the files that were hashed where they were written; the others are hashed here.
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
        }
        final = self._root / f"rollout_{rollouts_done:06d}"
        with writing(final):
            write_text(temporary / PLUGINS, [json.dumps(self._plugins, indent=1)])
            write_text(temporary / CONFIG, [self._config.to_toml()])
            others = [path for path in temporary.rglob("*") if path.is_file()]
            known = {temporary / name for name in files}
            state["files"] = {**files, **record_files(temporary, set(others) - known)}
            state["sha256"] = digest_of_json(json.loads(json.dumps(state)))
            write_text(temporary / STATE, [json.dumps(state, indent=1)])
            # The one of this number is moved first, because deleting it takes time. If it is already aside, where a
            # killed run left it, it stays until the new one has the name.
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
            pointer = self._root / ".latest.partial"
            write_text(pointer, [final.name, "\n"])
            pointer.replace(self._root / LATEST)
            shutil.rmtree(replaced, ignore_errors=True)
        return final

    def discard(self, temporary: Path) -> None:
        """Delete what `begin` made, after an error: on a full disk it would take the place of logs."""
        shutil.rmtree(temporary, ignore_errors=True)


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
