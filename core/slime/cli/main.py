"""The `slime` command: calls the subcommands, and turns errors into messages and exit codes.

Importing this module and printing the help loads only the standard library. A subcommand is imported when it is called.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import logging
import os
import select
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, NoReturn

from slime import __version__
from slime.cli.output import is_coloured, print_plain, write
from slime.errors import (
    ConfigError,
    PreemptedError,
    SlimeError,
    TerminatedInterrupt,
    did_you_mean,
    disk_full,
    is_disk_full,
    one_line,
)
from slime.errors.raised import ONLY_IN_LOGS
from slime.errors.redaction import without_credentials
from slime.shops import import_shop

#: name -> (module with `run(argv) -> int`, summary); those of other packages are entry points of `COMMAND_GROUP`
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("slime.cli.train", "train a model"),
    "eval": ("slime.cli.eval", "score a model or a checkpoint on held-out prompts"),
    "score": ("slime.cli.score", "try rewards on stored responses"),
    "launch": ("slime_launch.command", "run on a cluster: Slurm, Kubernetes, SkyPilot, Ray"),
    "cluster": ("slime_launch.cluster_command", "check the nodes of a Ray cluster before a run"),
    "convert": ("slime_planner.convert", "write a checkpoint or an fp8 model as a Hugging Face folder"),
    "view": ("slime_viewer.view_command", "look at runs in the browser"),
    "show": ("slime_viewer.show_command", "print a run: curves, what went wrong, samples"),
    "compare": ("slime_viewer.compare_command", "print how two runs differ"),
    "plan": ("slime_planner.plan_command", "say what a run needs on a cluster that is only described"),
    "plugins": ("slime.cli.plugins", "list, check and create plugins"),
    "completion": ("slime.cli.completion", "print what bash, zsh or fish need to complete commands"),
    "doctor": ("slime_planner.doctor", "say what is installed, and whether GPUs can be used"),
}
#: entry points `NAME = package.module`, whose module has `run(argv) -> int`; they are not plugins, and no run has them
COMMAND_GROUP = "slime.commands"
#: the exit code if nobody reads the output: that of a command which SIGPIPE ended, as shells report it
_UNREAD = 141
_USAGE = """\
usage: slime COMMAND ...

Reinforcement-learning post-training for language models: Megatron-core and
SGLang under Ray.

commands:
{commands}
`slime COMMAND --help` describes a command.

options:
  --help      this text
  --version   slime's version
"""


def command(argv: Sequence[str] | None = None) -> NoReturn:
    """The `slime` command: run `main` and end the process with its exit code."""
    # Python has none of a stream that was closed before the start (`slime train >&-`).
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - until the end
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        print_plain(stream)
    try:
        code = main(argv)
    except Exception:  # noqa: BLE001 - printed as Python would
        sys.excepthook(*sys.exc_info())
        code = 1
    if any(thread.daemon for thread in threading.enumerate()):
        _end_beside_threads(code)
    sys.exit(code)


def _end_beside_threads(code: int) -> NoReturn:
    """End this process while daemon threads run, such as the thread of a tracker that hangs.

    Python would take itself apart while they run, and crash if one is in native code: an interrupted run ended with
    SIGSEGV instead of 130.
    """
    # As Python itself does at its end: wait for the other threads, then call what was registered. Neither is public.
    threads: Any = threading
    for clean_up in (threads._shutdown, atexit._run_exitfuncs):
        try:
            clean_up()
        except BaseException:  # noqa: BLE001 - such as Ctrl-C, which must not keep the process from ending
            sys.excepthook(*sys.exc_info())
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):  # a full disk, a closed pipe or stream
                stream.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, that of a `SlimeError` (2: bad input), 130 after Ctrl-C.

    143: SIGTERM ended a run. 141: the reader of the output is gone.
    """
    try:
        with _warnings_to_stderr():
            code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except SlimeError as error:
        (_tell if isinstance(error, PreemptedError) else _fail)(str(error))
        _print_notes(error)
        return error.exit_code
    except BrokenPipeError:
        # The reader of the output is gone (`slime train --help | head`); keep Python from writing to it again at exit.
        unread = [*filter(_is_unread, (sys.stdout.fileno(), sys.stderr.fileno()))]
        for stream in unread:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if not unread:  # another pipe has broken
            raise
        return _UNREAD
    except OSError as error:
        if not is_disk_full(error):
            raise
        _fail(disk_full(error))
        _print_notes(error)
        return 1
    except KeyboardInterrupt as interruption:
        terminated = isinstance(interruption, TerminatedInterrupt)
        _tell("ended by SIGTERM" if terminated else "interrupted")
        _print_notes(interruption)
        return 143 if terminated else 130


def _run(words: list[str]) -> int:
    if not words or words[0] in ("--help", "-h"):
        write(_help())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"slime {__version__}")
        return 0
    code: int = module_of(words[0]).run(words[1:])
    return code


def _is_unread(stream: int) -> bool:
    """Whether a stream is a pipe that nobody reads."""
    poll = select.poll()
    poll.register(stream, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def module_of(command: str) -> ModuleType:
    """The module of a command. Raises `ConfigError` if there is none, or its package is missing or broken."""
    if command in COMMANDS:
        return import_shop(COMMANDS[command][0], f"`slime {command}`")
    # Reading the metadata of all packages takes longer than printing a help text, so only for unknown commands.
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group=COMMAND_GROUP)}
    if command not in found:
        known = [*COMMANDS, *found]
        raise ConfigError(f"unknown command {command!r}.{did_you_mean(command, known)} Commands: {', '.join(known)}.")
    try:
        module: ModuleType = found[command].load()
    except Exception as error:
        package = found[command].value
        raise ConfigError(f"`slime {command}` of {package} cannot be loaded: {one_line(error)}") from error
    return module


def _for_people(record: logging.LogRecord) -> bool:
    """Whether the terminal gets a log record: not the whole tracebacks, of which it gets the last lines."""
    return record.levelno >= logging.WARNING and not getattr(record, ONLY_IN_LOGS, False)


class _Warning(logging.Formatter):
    """Formats a log record like an error message: `slime: warning: ...`."""

    def format(self, record: logging.LogRecord) -> str:
        level = _marked(f"{record.levelname.lower()}:", "33" if record.levelno == logging.WARNING else "1;31")
        return f"slime: {level} {without_credentials(super().format(record))}"


@contextmanager
def _warnings_to_stderr() -> Iterator[None]:
    """Print the warnings that slime logs to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Warning())
    handler.addFilter(_for_people)
    logger = logging.getLogger("slime")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _fail(message: str) -> None:
    _tell(f"{_marked('error:', '1;31')} {without_credentials(message)}")


def _marked(word: str, colour: str) -> str:
    """A word in a colour, where standard error may have one. Without rich, which may be what is missing."""
    return f"\x1b[{colour}m{word}\x1b[0m" if is_coloured(sys.stderr) else word


def _print_notes(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        _tell(note)


def _tell(text: str) -> None:
    with suppress(BrokenPipeError):  # nobody reads it: the exit code says the rest
        print(f"slime: {text}", file=sys.stderr)


def _help() -> str:
    return _USAGE.format(commands="".join(f"  {name:<10}  {summary}\n" for name, (_, summary) in COMMANDS.items()))


if __name__ == "__main__":
    command()
