"""`slime plugins --for RUN.toml`: what one run would use, and whether it can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from slime import __version__
from slime.cli.plugins_json import RunListing, UseRow
from slime.cli.text_layout import count, table
from slime.errors import ConfigError, PluginConflictError, PluginError, PluginNotFoundError, SlimeError
from slime.plugin import API_VERSION
from slime.plugins.plugin_set import PluginSet, load_plugins, survey_plugins
from slime.plugins.resolve import Use, components_used

if TYPE_CHECKING:
    from slime.compat.functions import PlacedFunctions
    from slime.config import RunConfig


def print_used(words: Sequence[str], *, json: bool) -> int:
    """Print what `slime train WORDS` would use; the exit code is 1 when it cannot use some of it.

    Raises:
        ConfigError: The words do not describe a run.
    """
    # The table of all flags is only needed here.
    from slime.compat.functions import place_functions
    from slime.config import read_config, resolve

    if not words:
        raise ConfigError("slime plugins --for needs a run: the words of `slime train`, such as RUN.toml")
    functions = place_functions(read_config(words))
    used = _survey(resolve(functions.config), functions)
    problems = [f"{use.slot}: {use.problem}" for use in used.uses if use.problem] + used.problems
    if json:
        print(used.model_dump_json(indent=2))
    else:
        print(table(("SLOT", "COMPONENT", "VERSION", "STATUS", "FROM"), map(_cells, used.uses)))
        print("", count(len(problems), "problem") if problems else "everything this run uses is there", sep="\n")
        for problem in problems:
            print(problem)
    return int(bool(problems))


def _survey(config: RunConfig, functions: PlacedFunctions) -> RunListing:
    from slime.config.function_flags import choice_problems

    problems = [*functions.problems, *choice_problems(config)]
    try:
        plugins = load_plugins(config.plugins, functions.components)
    except SlimeError as error:
        # [plugins] refuses the installed plugins; show what the run would use without that.
        problems.append(str(error))
        plugins = survey_plugins(given=functions.components)
    uses = [_use(use, plugins, config) for use in components_used(config) if not functions.has_failed(use.name)]
    if not problems and all(use.problem is None for use in uses):
        try:
            plugins.check_config(config)
        except SlimeError as error:
            problems.append(str(error))
    return RunListing(slime=__version__, api=API_VERSION, uses=uses, problems=problems)


def _use(use: Use, plugins: PluginSet, config: RunConfig) -> UseRow:
    known: dict[str, Any] = {"slot": use.slot, "kind": use.kind, "name": use.name, "weight": use.weight}
    try:
        component = plugins.find(use.kind, use.name)
        found = component.found
        known |= {"id": component.id, "distribution": found.distribution, "version": found.version}
        resolved = plugins.resolve_use(use, config)
    except SlimeError as error:
        return UseRow(**known, status=_status(error), problem=str(error))
    return UseRow(**known, status="ok", options=resolved.options.model_dump(mode="json"))


def _status(error: SlimeError) -> Literal["missing", "clash", "broken", "refused"]:
    if isinstance(error, PluginNotFoundError):
        return "missing"
    if isinstance(error, PluginConflictError):
        return "clash"
    return "broken" if isinstance(error, PluginError) else "refused"


def _cells(use: UseRow) -> tuple[str, ...]:
    weight = "" if use.weight == 1.0 else f" x {use.weight:g}"
    return use.slot, (use.id or use.name) + weight, use.version or "-", use.status, use.distribution or "-"
