"""`slime plugins --for RUN.toml`: what one run would use, and whether it can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from slime import __version__
from slime.cli.plugins.layout import aligned
from slime.cli.plugins.rows import RunListing, UseRow
from slime.errors import ConfigError, PluginConflictError, PluginError, PluginNotFoundError, SlimeError
from slime.plugin import API_VERSION
from slime.plugins import PluginSet, load_plugins, survey_plugins
from slime.plugins.resolve import Use, components_used

if TYPE_CHECKING:
    from slime.config import RunConfig

_COLUMNS = ("SLOT", "COMPONENT", "VERSION", "STATUS", "FROM")


def for_run(words: Sequence[str], *, json: bool) -> int:
    """Print what `slime train WORDS` would use; 1 when something of it cannot be used.

    Raises `ConfigError` for words that state no run.
    """
    # The table of flags is only needed here.
    from slime.config import read_config, resolve

    if not words:
        raise ConfigError("slime plugins --for needs a run: the words of `slime train`, such as RUN.toml")
    content = _survey(resolve(read_config(words)))
    print(content.model_dump_json(indent=2) if json else _text(content))
    return int(bool(_problems(content)))


def _survey(config: RunConfig) -> RunListing:
    from slime.config.local_paths import function_problems

    problems = list(function_problems(config))
    try:
        plugins = load_plugins(config.plugins)
    except SlimeError as error:
        # The gates of [plugins] stay shut; what is behind them can still be told.
        problems.append(str(error))
        plugins = survey_plugins()
    uses = [_use(use, plugins, config) for use in components_used(config)]
    if not problems and all(use.problem is None for use in uses):
        try:
            plugins.check_config(config)
        except SlimeError as error:
            problems.append(str(error))
    return RunListing(slime=__version__, api=API_VERSION, uses=uses, problems=problems)


def _use(use: Use, plugins: PluginSet, config: RunConfig) -> UseRow:
    stated: dict[str, Any] = {"slot": use.slot, "kind": use.kind, "name": use.name, "weight": use.weight}
    try:
        component = plugins.find(use.kind, use.name)
    except SlimeError as error:
        return UseRow(**stated, status=_status(error), problem=str(error))
    stated |= {"id": component.id, "distribution": component.distribution, "version": component.version}
    try:
        resolved = plugins.resolve_use(use, config)
    except SlimeError as error:
        return UseRow(**stated, status=_status(error), problem=str(error))
    return UseRow(**stated, status="ok", options=resolved.options.model_dump(mode="json"))


def _status(error: SlimeError) -> Literal["missing", "clash", "broken", "refused"]:
    if isinstance(error, PluginNotFoundError):
        return "missing"
    if isinstance(error, PluginConflictError):
        return "clash"
    return "broken" if isinstance(error, PluginError) else "refused"


def _problems(content: RunListing) -> list[str]:
    return [f"{use.slot}: {use.problem}" for use in content.uses if use.problem] + content.problems


def _text(content: RunListing) -> str:
    rows = [_COLUMNS, *map(_cells, content.uses)]
    problems = _problems(content)
    count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
    return "\n".join([aligned(rows), "", "everything this run uses is there" if not problems else count, *problems])


def _cells(use: UseRow) -> tuple[str, ...]:
    weight = "" if use.weight == 1.0 else f" x {use.weight:g}"
    return use.slot, (use.id or use.name) + weight, use.version or "-", use.status, use.distribution or "-"
