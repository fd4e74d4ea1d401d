"""The `slime` command: dispatch, and the one place where errors become messages and exit codes.

Importing this module and printing the help imports nothing but the standard library: subcommands are loaded
when they are called.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from slime import __version__
from slime.errors import SlimeError, did_you_mean

#: name -> (module with `run(argv) -> int`, summary)
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("slime.cli.train", "train a model; `slime train --help` lists the options"),
    "eval": ("slime.cli.eval", "score a model or a checkpoint on held-out prompts; `slime eval --help` tells more"),
    "plugins": ("slime.cli.plugins", "list the installed plugins, where they are from and whether they work"),
}
_USAGE = """\
usage: slime COMMAND ...

Reinforcement-learning post-training for language models: Megatron-core and SGLang under Ray.

commands:
{commands}
options:
  --help      this text
  --version   slime's version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0, a `SlimeError`'s own (2: bad input), or 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("--help", "-h"):
        print(_help())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"slime {__version__}")
        return 0
    command, *rest = words
    if command not in COMMANDS:
        return _say(
            f"unknown command {command!r}.{did_you_mean(command, COMMANDS)} Commands: {', '.join(COMMANDS)}.", 2
        )
    try:
        with _warnings_told():
            code: int = importlib.import_module(COMMANDS[command][0]).run(rest)
        sys.stdout.flush()
        return code
    except SlimeError as error:
        return _say(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:
        # The reader of our output went away (`slime train --help | head`); the interpreter must not try again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Warning(logging.Formatter):
    """`slime: warning: ...`, as errors are told."""

    def format(self, record: logging.LogRecord) -> str:
        return f"slime: {record.levelname.lower()}: {super().format(record)}"


@contextmanager
def _warnings_told() -> Iterator[None]:
    """What slime logs as a warning is a line on standard error that says so."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Warning())
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("slime")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _say(message: str, code: int) -> int:
    print(f"slime: {'error: ' if code != 130 else ''}{message}", file=sys.stderr)
    return code


def _help() -> str:
    return _USAGE.format(commands="".join(f"  {name:<10}  {summary}\n" for name, (_, summary) in COMMANDS.items()))


if __name__ == "__main__":
    sys.exit(main())
