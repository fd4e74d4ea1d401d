"""`slime train`: check a run, then plan it (`--dry-run`) or run it."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from slime.cli.checkpoint_choice import set_aside_later
from slime.cli.checkpoint_config import exporting_config
from slime.cli.output import page, write
from slime.cli.plan import lines_of_plugins, plan_text
from slime.cli.preflight import Preflight, preflight
from slime.cli.resume import (
    continued_notes,
    is_finished,
    is_repeated,
    lacks_evaluation,
    resumed_config,
    split_resume,
)
from slime.cli.run_folders import RunLock, finished_rollouts, real_path, require_no_links_out
from slime.cli.train_help import engine_help, search_help, train_help
from slime.compat.functions import place_functions
from slime.config import RunConfig, config_notes, read_config, resolve
from slime.config.flags import MEGATRON, SGLANG
from slime.config.run_file import with_absolute_paths
from slime.errors import ConfigError, DiskFullError, SlimeError, writing
from slime.errors.redaction import redacted
from slime.observe.abandoned import set_aside_records
from slime.observe.samples import write_whole
from slime.run.checkpoint.read import CONFIG, read_checkpoint
from slime.shops import import_shop

logger = logging.getLogger(__name__)

_HELP = {"--help": None, "-h": None, "--help-megatron": MEGATRON, "--help-sglang": SGLANG}
_DRY_RUN, _FROM_RECIPE = "--dry-run", "--from-recipe"
#: how the line begins that is all the output for a run that is finished
NOTHING_LEFT = "nothing is left to do"


def run(argv: Sequence[str], *, elsewhere: bool = False) -> int:
    """The command; returns its exit code.

    Args:
        argv: Its words.
        elsewhere: With `--dry-run`: whether the run is handed over to another place or a later time, so that neither a
            run in its folder nor the cluster that there is now matters, and all that it needs has to be here.

    Raises:
        ConfigError: Bad input, before any process starts.
        SlimeError: The run failed.
    """
    for word in argv:
        if word in _HELP:
            target = _HELP[word]
            rest = [other for other in argv if other not in _HELP and other != _DRY_RUN]
            if target is None and argv[0] == word and rest and not any(_chooses(other) for other in rest):
                page(search_help(rest))
                return 0
            page(train_help(rest) if target is None else engine_help(target))
            return 0
    if any(word.partition("=")[0] == _FROM_RECIPE for word in argv):
        return int(import_shop("slime_planner.recipes.command", f"`{_FROM_RECIPE}`").run(argv))
    started = time.localtime()
    words, place = split_resume([word for word in argv if word != _DRY_RUN])
    stated = read_config(words) if place is None else resumed_config(place, words)
    notes = config_notes(stated)
    functions = place_functions(stated)
    config = resolve(functions.config)
    name = config.run.run_name or time.strftime("%Y-%m-%d_%H%M%S", started)
    config = config.with_options("run", run_name=name)
    folder = run_folder(config)
    require_no_links_out(folder)
    with ExitStack() as held:
        resumes, lock = place is not None and (folder / CONFIG).is_file(), None
        if resumes:
            lock = None if elsewhere else held.enter_context(RunLock(folder))
            if is_repeated(config, folder):
                print(
                    f"{NOTHING_LEFT}: the run in {folder} has gone on from {config.checkpoint.load}, and is"
                    f" finished. To do that again, beside it: slime train {folder / CONFIG} --run-name NAME"
                )
                return 0
            if is_finished(config, folder):
                print(f"{NOTHING_LEFT}: the run in {folder} is finished")
                return 0
            if config.checkpoint.load is None:
                notes.append(f"{folder} has no checkpoint yet: the run starts from the beginning, in the same folder")
        unevaluated = resumes and lacks_evaluation(config, folder)
        checked = preflight(
            place_checkpoints(config),
            folder,
            functions,
            resumes=resumes,
            unevaluated=unevaluated,
            plans=_DRY_RUN in argv and not elsewhere,
        )
        of_plugins = lines_of_plugins(checked)
        notes += [*checked.notes, *continued_notes(checked, resumes=resumes), *of_plugins.pop("notes", [])]
        if checked.trained and unevaluated:
            notes.append("nothing is left to train: only the evaluation after the last rollout is made")
        if checked.finished is not None:
            notes.append(f"nothing is left to train: {checked.finished.path} is exported to {checked.export_folder}")
        if _DRY_RUN in argv:
            if checked.config.cluster.ray_address is not None and not elsewhere:
                from slime.cli.preflight_cluster import cluster_notes  # it imports Ray

                notes += cluster_notes(checked)
            write(plan_text(checked, of_plugins, notes))
            return 0
        with suppress(BrokenPipeError):  # nobody reads them, and the run goes on
            for note in notes:
                print(f"slime: note: {note}", file=sys.stderr)
        lock = lock or held.enter_context(RunLock(folder))
        save = checked.config.checkpoint.save
        if save is not None and real_path(save) != real_path(folder):  # whose lock the run has
            held.enter_context(RunLock(Path(save), "the run that saves to")).write()
        if not resumes:
            make_run_folder(folder, config)
        lock.write(finished=finished_rollouts(folder) or None)
        code = _train(checked, argv, started, _Beginning(folder, config, lock, notes))
        lock.write(finished=config.num_rollout)
        return code


class _Beginning:
    """What a run changes of an earlier one in its folders, once it has started and loaded what it continues from.

    A run that fails before leaves them as they were.
    """

    def __init__(self, folder: Path, config: RunConfig, lock: RunLock, notes: Sequence[str]) -> None:
        self._folder, self._config, self._lock, self._notes = folder, config, lock, notes
        #: where the checkpoints are after the one that the run goes on from
        self.aside: Path | None = None

    def __call__(self, attempted: RunConfig) -> None:
        """An attempt at the run begins, with this configuration."""
        make_run_folder(self._folder, self._config)
        self._lock.write()
        for note in self._notes:
            logger.info("note: %s", note)
        start = None if (load := attempted.checkpoint.load) is None else read_checkpoint(Path(load))
        if start is not None:
            self.aside = set_aside_later(attempted, start) or self.aside
        if (records := set_aside_records(self._folder, 0 if start is None else start.rollouts_done)) is not None:
            logger.info("what an earlier attempt recorded after that is in %s", records)


def _train(checked: Preflight, argv: Sequence[str], started: time.struct_time, begins: _Beginning) -> int:
    # It imports Ray, which no check needs.
    from slime.run import entry

    if checked.finished is not None:
        exporting = resolve(exporting_config(checked.config, checked.finished))
        return entry.export(exporting, checked.run_dir, checked.plugins, checked.export_folder)
    try:
        return entry.train(checked.config, checked.run_dir, checked.plugins, begins)
    except (KeyboardInterrupt, Exception) as error:
        if not isinstance(error, SlimeError) or error.exit_code != 2:  # bad input is not to be continued
            error.add_note(how_to_continue(checked.config, checked.run_dir, argv, since=started))
        if type(error) is KeyboardInterrupt and checked.config.checkpoint.save is not None:
            error.add_note("Ctrl-C saves nothing; `kill PID` (SIGTERM) saves a checkpoint after the step, then ends")
        if begins.aside is not None:
            error.add_note(f"the checkpoints after the one that the run went on from are in {begins.aside}")
        raise


def how_to_continue(config: RunConfig, run_dir: Path, argv: Sequence[str], *, since: time.struct_time) -> str:
    """How a run that was interrupted or has failed can be continued.

    Args:
        config: Its configuration.
        run_dir: Its folder.
        argv: Its command line.
        since: When it started: older checkpoints are not its own.

    Returns:
        A note for the user.
    """
    options = config.checkpoint
    newest = None if options.save is None else Path(options.save, "latest")
    if newest is not None and newest.is_file() and newest.stat().st_mtime >= time.mktime(since):
        command = shlex.join(["slime", "train", "--resume", str(run_dir), *_secrets(argv)])
        return f"to continue from the checkpoint {newest.read_text(encoding='utf-8').strip()}:\n  {command}"
    if options.load is not None:
        return f"no new checkpoint was written: the same command continues from {options.load} again"
    if newest is not None:
        return "no checkpoint had been written yet, so the run can only be started again"
    return "the run wrote no checkpoint to continue from: --save-interval N writes one every N rollouts"


def _secrets(argv: Sequence[str]) -> Iterator[str]:
    """The flags of a command line with secrets, which the saved configuration lacks; a mark takes their place."""
    before = ""
    for word in argv:
        name, _, value = word.partition("=")
        if not name.startswith("--"):
            name, value = before, word
        if value and (shown := redacted(value, name.removeprefix("--"))) != value:
            yield f"{name}={shown}"
        before = word if word.startswith("--") else ""


def _chooses(word: str) -> bool:
    """Whether a word behind `--help` is a flag or a run file, which choose what the help shows."""
    return word.startswith("-") or word.endswith(".toml") or Path(word).is_file()


def place_checkpoints(config: RunConfig) -> RunConfig:
    """Save checkpoints in the run folder if only their interval is set.

    The saved configuration does not name that folder, so that a new run started from it has its own checkpoints.
    """
    options = config.checkpoint
    if options.save_interval is None or options.save is not None:
        return config
    return config.with_options("checkpoint", save=str(run_folder(config) / "checkpoints"))


def run_folder(config: RunConfig) -> Path:
    """The folder that the run writes to.

    Raises:
        ConfigError: The run's name would lead out of the output folder.
    """
    name = config.run.run_name
    # Line breaks and escape codes would act on the terminal that shows the name, and on logs.
    if not name or name in (".", "..") or "/" in name or not name.isprintable():
        raise ConfigError(f"--run-name {name!r} cannot name a folder in --output-dir {config.run.output_dir}")
    return Path(config.run.output_dir) / name


def make_run_folder(folder: Path, config: RunConfig) -> None:
    """Make the run folder and write the resolved configuration to it, which works from any folder.

    It is whole even if the run is killed now.
    """
    try:
        with writing(folder / CONFIG):
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / CONFIG, with_absolute_paths(config).to_toml().encode())
    except DiskFullError:
        raise
    except OSError as error:
        raise ConfigError(f"the run folder {folder} cannot be written to: {error.strerror}") from error
