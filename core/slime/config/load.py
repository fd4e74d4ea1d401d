"""From `slime train`'s command line, with or without a run file, to a `RunConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime.config.assemble import assemble
from slime.config.checks import config_problems
from slime.config.command_line import parse_command_line
from slime.config.local_paths import without_rivals
from slime.config.own_flags import flag_table
from slime.config.resolve import resolve
from slime.config.run_config import RunConfig
from slime.config.run_file import parse_run_file, read_run_file
from slime.config.settings import Settings, stop_on


def read_config(argv: Sequence[str]) -> RunConfig:
    """`[run.toml] [--flag value]...` as stated: every value checked, flags over the file, nothing filled in.

    Raises one `ConfigError` that tells every problem found.
    """
    flags = flag_table()
    line = parse_command_line(argv, flags)
    settings = Settings()
    for path in line.files:
        settings = settings.followed_by(read_run_file(path, flags))
    return assemble(without_rivals(settings, line.settings).followed_by(line.settings))


def load_config(argv: Sequence[str]) -> RunConfig:
    """`read_config` with everything that follows filled in, and checked as far as the configuration alone tells.

    Raises one `ConfigError` that tells every problem found.
    """
    config = resolve(read_config(argv))
    stop_on(config_problems(config))
    return config


def config_from_toml(text: str, name: str | Path = "run file") -> RunConfig:
    """The configuration a run file's text states, nothing filled in; reverses `RunConfig.to_toml`.

    Raises one `ConfigError` that tells every problem found.
    """
    return assemble(parse_run_file(text, str(name), flag_table()))
