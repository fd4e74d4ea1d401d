"""`slime train --resume`: continues the run in a folder, or with `auto` starts or continues the command's run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from slime import __version__
from slime.cli.preflight import Preflight
from slime.cli.run_folders import finished_rollouts
from slime.config import RunConfig, config_from_toml, read_config
from slime.config.assemble import assemble
from slime.config.choices import override
from slime.config.command_line import CommandLine
from slime.config.run_config import SECTIONS
from slime.config.run_file import read_run_file, with_absolute_paths
from slime.errors import CheckpointError, ConfigError
from slime.errors.redaction import MARK, redacted
from slime.observe.metrics import eval_set_names, read_metrics
from slime.run.checkpoint.files import LATEST
from slime.run.checkpoint.read import CONFIG, STATE, checkpoints_in, read_checkpoint

AUTO = "auto"
_FLAG = "--resume"


def split_resume(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """The words of a command line without `--resume`, and its value, if it is there.

    Raises:
        ConfigError: It has no value.
    """
    words, place = list(argv), None
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name != _FLAG:
            continue
        if place is not None:
            raise ConfigError(
                f"{_FLAG} is there twice: give it once, with a run folder to continue, or with {AUTO} to start or"
                " continue the run that the other words describe"
            )
        after = [value] if equals else list(argv[index + 1 : index + 2])
        if not after or not after[0] or after[0].startswith("--"):
            raise ConfigError(f"{_FLAG} needs a value: a run folder (outputs/NAME), or {AUTO}")
        words, place = [*argv[:index], *argv[index + (1 if equals else 2) :]], after[0]
    return words, place


def resumed_config(place: str, words: Sequence[str]) -> RunConfig:
    """The configuration of `slime train --resume PLACE WORDS`, in which `--load` names what the run continues from.

    Raises:
        ConfigError: There is nothing to resume at `place`, or the words do not fit to it.
    """
    if place == AUTO:
        return _of_command(words)
    folder = Path(os.path.normpath(place))
    return _of_folder(folder if folder.name not in ("", "..") else Path(os.path.abspath(folder)), words)


def _of_folder(folder: Path, words: Sequence[str]) -> RunConfig:
    """The saved configuration of a run folder, with the flags in `words`."""
    line = CommandLine(words)
    if line.file is not None:
        raise ConfigError(f"{_FLAG} {folder} reads {folder / CONFIG}: drop {line.file}")
    for target, key, flag in (("run", "run_name", "--run-name"), ("run", "output_dir", "--output-dir")):
        if (target, key) in line.settings.items:
            raise ConfigError(f"{flag} and {_FLAG} {folder} exclude each other: the run goes on in its folder")
    saved = _saved(folder)
    try:
        config = assemble(override(read_run_file(folder / CONFIG), line.settings))
    except ConfigError as error:
        raise ConfigError(f"{error}{_other_version(folder)}") from error
    if ("checkpoint", "load") not in line.settings.items:
        config = config.with_options("checkpoint", load=_newest(saved, folder))
    return config.with_options("run", output_dir=str(folder.parent), run_name=folder.name)


def _of_command(words: Sequence[str]) -> RunConfig:
    """The configuration of a complete command line, continued if its run folder, or its `--save`, has a state of it."""
    config = read_config(words)
    name, save, load = config.run.run_name, config.checkpoint.save, config.checkpoint.load
    if name is None:
        raise ConfigError(
            f"{_FLAG} {AUTO} needs --run-name: without it every start is named by date and time, and finds nothing to"
            " continue"
        )
    folder = Path(config.run.output_dir) / name
    if (folder / CONFIG).is_file():
        load = _newest(_saved(folder), folder) or load
    # The run folder may have been on a machine that is gone.
    elif save is not None and load is None and _saved_by(Path(save), name):
        load = save
    # With nothing to continue there is nothing to skip, and the flag would be refused.
    skips = config.checkpoint.skip_damaged_checkpoints and load is not None
    return config.with_options("checkpoint", load=load, skip_damaged_checkpoints=skips)


def _saved(folder: Path) -> RunConfig:
    path = folder / CONFIG
    if (folder / STATE).is_file():
        raise ConfigError(f"{_FLAG} {folder}: this is a checkpoint, expected a run folder. --load continues from one")
    if not path.is_file():
        missing = "it has no config.toml" if folder.is_dir() else "it does not exist"
        raise ConfigError(f"{_FLAG} {folder}: {missing}; expected a run folder (outputs/NAME), or {AUTO}")
    try:
        return config_from_toml(path.read_text(encoding="utf-8"), path)
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"{error}{_other_version(folder)}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _other_version(folder: Path) -> str:
    """What to add to an error about a saved configuration that another version of slime wrote."""
    with suppress(OSError, ValueError):
        written = json.loads((folder / "plugins.json").read_text(encoding="utf-8")).get("slime")
        if written != __version__:
            return (
                f"\nThe run was started with slime {written}; this is slime {__version__}. Continue it with that one."
            )
    return ""


def _newest(saved: RunConfig, folder: Path) -> str | None:
    """Where a run folder's run continues: in its `--save` folder if there is a checkpoint, else where it began."""
    root, load = Path(saved.checkpoint.save or folder / "checkpoints"), saved.checkpoint.load
    if (root / LATEST).exists():
        return str(root)
    # A run that was killed a moment before it could write `latest` has a complete checkpoint.
    return next((str(path) for path in checkpoints_in(root)), load)


def _saved_by(root: Path, name: str) -> bool:
    """Whether the newest checkpoint in `root` was saved by a run of this name."""
    try:
        return read_checkpoint(root).config.run.run_name == name
    except (CheckpointError, ConfigError):
        return False


def lacks_evaluation(config: RunConfig, folder: Path) -> bool:
    """Whether the evaluation after the last rollout is missing among the metrics of the run in `folder`.

    A run may be killed, or preempted, between its last checkpoint and the end of that evaluation.
    """
    if config.evaluation.eval_interval is None:
        return False
    with suppress(OSError):
        rows = read_metrics(folder)
        return not any(row["step"] == config.num_rollout and eval_set_names(row) for row in rows)
    return False


def is_finished(config: RunConfig, folder: Path) -> bool:
    """Whether nothing is left to do of the run in `folder`: all is trained, and exported if `--save-hf` is set."""
    total = config.rollout.num_rollout
    if total is None:
        return False
    if finished_rollouts(folder) >= max(total, 1) and not _goes_back(config):
        return True
    if config.checkpoint.load is None or config.checkpoint.save_hf is not None or lacks_evaluation(config, folder):
        return False
    with suppress(CheckpointError):
        return read_checkpoint(Path(config.checkpoint.load)).is_last(config)
    return False


def is_repeated(config: RunConfig, folder: Path) -> bool:
    """Whether the run in `folder` has gone on from the older checkpoint of --load in just this way, and is finished."""
    if finished_rollouts(folder) < max(config.num_rollout, 1) or not _goes_back(config):
        return False
    with suppress(OSError):
        return (folder / CONFIG).read_bytes() == with_absolute_paths(config).to_toml().encode()
    return False


def _goes_back(config: RunConfig) -> bool:
    """Whether --load names an older checkpoint than the newest beside it, after which there is something to train."""
    with suppress(CheckpointError):
        start = None if config.checkpoint.load is None else read_checkpoint(Path(config.checkpoint.load))
        if start is not None and not start.is_last(config):
            return checkpoints_in(start.place.parent)[:1] != [start.place]
    return False


# --- what a run goes on from -------------------------------------------------------------------------


def continued_notes(checked: Preflight, *, resumes: bool) -> Iterator[str]:
    """What differs from the run that saved the checkpoint, and what the run leaves behind.

    Args:
        checked: The run.
        resumes: Whether it goes on in its own folder, where all checkpoints should be its own.
    """
    start, config = checked.checkpoint, checked.config
    if start is None:
        return
    saved: RunConfig | None = None
    other: list[str] = []
    try:
        saved = start.config
        other = list(_other_options(saved, config))
    except (CheckpointError, ConfigError) as error:
        yield (
            f"the options with which {start.place} was saved cannot be compared, and the learning rate goes on at the"
            f" saved step: {error}"
        )
    if saved is not None and resumes and saved.run.run_name != config.run.run_name:
        how = f", with other options: {', '.join(other)}" if other else ", with the same options"
        yield f"{start.place} was saved by the run {saved.run.run_name}{how}. Is it the one that you mean?"
    elif other:
        yield f"{start.place} was saved with other options: {', '.join(other)}"
    if checked.left_behind:
        names = ", ".join(path.name for path in reversed(checked.left_behind))
        yield (
            f"the run leaves the checkpoints after {start.place.name} ({names}): they are moved to a"
            f" folder abandoned_N in {checked.left_behind[0].parent}, and you may delete them"
        )


def _other_options(saved: RunConfig, now: RunConfig) -> Iterator[str]:
    """The options of training and sampling that differ, as flags. Paths may have moved, and are left out."""
    for section in ("rollout", "algorithm", "reward", "lora"):
        for name in SECTIONS[section].model_fields:
            was, value = getattr(getattr(saved, section), name), getattr(getattr(now, section), name)
            yield from _difference(SECTIONS[section].model_fields[name].alias or name, was, value)
    yield from _difference("seed", saved.run.seed, now.run.seed)
    yield from _difference("layer_backend", saved.layer_backend, now.layer_backend)
    for prefix, before, after in (
        ("", saved.megatron, now.megatron),
        ("sglang_", saved.sglang, now.sglang),
        *(
            (f"{slot}.", saved.component_options.get(slot, {}), now.component_options.get(slot, {}))
            for slot in sorted({*saved.component_options, *now.component_options})
        ),
    ):
        for name in sorted({*before, *after}):
            yield from _difference(prefix + name, before.get(name), after.get(name))


def _difference(name: str, was: object, value: object) -> Iterator[str]:
    shown = ["none" if one is None else str(redacted(one, name)) for one in (value, was)]
    if str(was) != str(value) and not any(part in f"{shown}" for part in ("/", MARK)):  # paths and secrets
        yield f"--{name.replace('_', '-')} {shown[0]} (was {shown[1]})"
