"""`slime plugins --for RUN.toml`: the components that a run would use, and whether it can use them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

from slime import __version__
from slime.cli.plugins_json import RunListing, UseRow
from slime.cli.preflight_plugins import CheckedPlugins, check_plugins
from slime.cli.text_layout import count, table
from slime.compat.functions import place_functions
from slime.config import read_config, resolve
from slime.config.choices import choice_problems
from slime.errors import ConfigError, PluginConflictError, PluginError, PluginNotFoundError, SlimeError
from slime.errors.redaction import redacted
from slime.plugin import API_VERSION
from slime.registry.resolve import Use


def print_used(words: Sequence[str], *, json: bool) -> int:
    """Print the components that `slime train WORDS` would use; returns 1 if it cannot use one of them.

    Raises:
        ConfigError: The words do not describe a run.
    """
    if not words:
        raise ConfigError("slime plugins --for needs a run: the arguments of `slime train`, such as RUN.toml")
    functions = place_functions(read_config(words))
    config = resolve(functions.config)
    checked = check_plugins(config, functions)
    listing = RunListing(
        slime=__version__,
        api=API_VERSION,
        uses=[_row(use, checked) for use in checked.uses],
        problems=[*functions.problems, *choice_problems(config), *checked.problems],
    )
    problems = [f"{slot}: {error}" for slot, error in checked.refused.items()] + listing.problems
    if json:
        print(listing.model_dump_json(indent=2))
    else:
        print(table(("SLOT", "COMPONENT", "VERSION", "STATUS", "FROM"), map(_cells, listing.uses)))
        print("", count(len(problems), "problem") if problems else "everything this run uses is there", sep="\n")
        for problem in problems:
            print(problem)
    return int(bool(problems))


def _row(use: Use, checked: CheckedPlugins) -> UseRow:
    known: dict[str, Any] = {"slot": use.slot, "kind": use.kind, "name": use.name, "weight": use.weight}
    with contextlib.suppress(PluginError):
        component = checked.plugins.find(use.kind, use.name)
        found = component.found
        known |= {"id": component.id, "distribution": found.distribution, "version": found.version}
    if (error := checked.refused.get(use.slot)) is not None:
        return UseRow(**known, status=_status(error), problem=str(error))
    return UseRow(**known, status="ok", options=redacted(checked.used[use.slot].options.model_dump(mode="json")))


def _status(error: SlimeError) -> Literal["missing", "clash", "broken", "refused"]:
    if isinstance(error, PluginNotFoundError):
        return "missing"
    if isinstance(error, PluginConflictError):
        return "clash"
    return "broken" if isinstance(error, PluginError) else "refused"


def _cells(use: UseRow) -> tuple[str, ...]:
    weight = "" if use.weight == 1.0 else f" x {use.weight:g}"
    return use.slot, (use.id or use.name) + weight, use.version or "-", use.status, use.distribution or "-"
