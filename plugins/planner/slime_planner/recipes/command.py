"""`slime train --from-recipe FILE`: the run of another framework's script as a run file, or as a dry run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from slime.cli import train
from slime.errors import ConfigError
from slime_planner.recipes.recipe import read_recipe
from slime_planner.recipes.rules import translate
from slime_planner.recipes.run_file import run_file

_FLAG = "--from-recipe"


def run(argv: Sequence[str]) -> int:
    """Print the run file; with `--dry-run`, check it too, with the other words as flags.

    Raises:
        ConfigError: The recipe cannot be read, or with `--dry-run` is not a run that can start.
    """
    words, place = _split(argv)
    dry = "--dry-run" in words
    if words and not dry:
        raise ConfigError(
            f"{_FLAG} prints a run file and starts nothing: write it to one with `> run.toml`, and give"
            f" {words[0]} to `slime train run.toml`"
        )
    text = run_file(translate(read_recipe(Path(place).expanduser())))
    print(text, end="")
    if not dry:
        return 0
    print(flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.toml")
        file.write_text(text, encoding="utf-8")
        try:
            return train.run([os.fspath(file), *words])
        except ConfigError as error:
            raise ConfigError(str(error).replace(os.fspath(file), "the run file above")) from error


def _split(argv: Sequence[str]) -> tuple[list[str], str]:
    """The other words, and the value of the flag."""
    words, places = list(argv), list[str]()
    for index in reversed([i for i, word in enumerate(argv) if word.partition("=")[0] == _FLAG]):
        _, equals, value = words.pop(index).partition("=")
        if not equals:
            value = words.pop(index) if index < len(words) and not words[index].startswith("--") else ""
        places.append(value)
    if len(places) != 1 or not places[0]:
        raise ConfigError(f"{_FLAG} needs one file: a shell script, YAML, or a script with GRPOConfig")
    return words, places[0]
