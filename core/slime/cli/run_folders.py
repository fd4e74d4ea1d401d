"""The folders that a run writes to: nothing of another run or model is lost in them.

`run.lock` in a run folder is held by the process that uses the folder, and says whether the run is finished. The folder
of `--save` has one too, since runs with other folders may save there.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from slime.config import RunConfig
from slime.errors import ConfigError, DiskFullError, writing
from slime.run.checkpoint.read import CONFIG, STATE, checkpoints_in

LOCK = "run.lock"
#: the least that a run writes to a folder
_LEAST_BYTES = 2**20
#: the folders in a run folder that slime writes to, besides that of the checkpoints
_FOLDERS = ("logs", "rollouts", "weights")
#: whether a name in a folder of checkpoints is written to
_SAVING = re.compile(r"latest|\.latest\.partial|\.rollout_\d+\.partial|abandoned_\d+|run\.lock").fullmatch

logger = logging.getLogger(__name__)


class RunLock:
    """Keeps a second run out of a folder. A context manager; the kernel unlocks it however the process ends."""

    def __init__(self, folder: Path, run: str = "the run in") -> None:
        """Lock a folder, which is made if need be.

        Args:
            folder: The folder.
            run: Which run uses it, for messages: the words before its path.

        Raises:
            ConfigError: A run in it is still going on, or it cannot be written to.
        """
        self._path = folder / LOCK
        try:
            with writing(self._path):
                folder.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except DiskFullError:
            raise
        except OSError as error:
            raise ConfigError(f"the folder of {run} {folder} cannot be written to: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            holder = _content(self._path)
            raise ConfigError(
                f"{run} {folder} is still going on: process {holder.get('pid')} on {holder.get('host')} uses the"
                " folder. Wait until it has ended, or end it"
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s): nothing keeps a second run out", self._path, error.strerror)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def write(self, finished: int | None = None) -> None:
        """Name this process in the file, and how many rollouts the run has if it is `finished`."""
        content = {"pid": os.getpid(), "host": socket.gethostname(), "finished": finished}
        with writing(self._path):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(content).encode(), 0)


def finished_rollouts(folder: Path) -> int:
    """How many rollouts a run had when it was finished, export included; 0 if it is not."""
    done = _content(folder / LOCK).get("finished")
    return done if isinstance(done, int) else 0


def _content(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}


def require_no_links_out(folder: Path) -> None:
    """Check that what a run writes to its folder stays in it.

    Raises:
        ConfigError: A file or folder that it writes is a link to a place outside.
    """
    below = (Path(place, name) for own in _FOLDERS for place, *held in os.walk(folder / own) for name in chain(*held))
    _require_inside(folder, chain(_entries(folder), below, _written_by_saving(folder / "checkpoints")))


def _require_inside(folder: Path, paths: Iterable[Path]) -> None:
    own = real_path(folder)
    for path in paths:
        if path.is_symlink() and not (to := real_path(path)).is_relative_to(own):
            raise ConfigError(
                f"{path} is a link to {to}, outside of {folder}, and the run would write there. Put a file or"
                " folder in its place, or remove it. Checkpoints can be in another folder: --save DIR"
            )


def real_path(path: str | Path) -> Path:
    """Where a path leads. `Path.resolve` raises for a link to itself, which is refused when the place is looked at."""
    return Path(os.path.realpath(path))


def _written_by_saving(root: Path) -> Iterator[Path]:
    """What is written to in a folder of checkpoints: nothing in one that is complete, which may be a link."""
    return (path for path in _entries(root) if _SAVING(path.name))


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.iterdir())
    return []


# --- checkpoints and exported models ----------------------------------------------------------------


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
    _require_inside(root, _written_by_saving(root))
    held = {STATE: "is a checkpoint", "config.json": "is a model folder"}
    if real_path(root) != real_path(run_dir):
        held[CONFIG] = "is the folder of another run"
    for name, what in held.items():
        if (root / name).exists():
            raise ConfigError(f"--save {root} {what} (it has {name}); expected a folder for checkpoints alone.")
    saved = checkpoints_in(root)
    load = config.checkpoint.load
    if not saved or (load is not None and real_path(load) in (real_path(root), *(real_path(one) for one in saved))):
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
    place = real_path(folder)
    for option, model in read.items():
        if model is None:
            continue
        source = real_path(model)
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


def unwritable(folder: Path) -> str | None:
    """Why `folder` cannot be made or written to, or None. A file is written there (or above) and removed again."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
    if not existing.is_dir():
        what = "a file" if existing.exists() else "a link that leads nowhere"
        return f"cannot be made: {existing} is {what}. Choose another folder"
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".slime-probe-") as probe:
            probe.write(bytes(_LEAST_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return f"cannot be written to: {error.strerror} ({existing}). Free space or choose another folder"
    return None
