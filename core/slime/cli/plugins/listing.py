"""The table of installed plugins."""

from __future__ import annotations

import inspect
import traceback
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from slime import __version__
from slime.cli.plugins.layout import aligned, folded
from slime.cli.plugins.rows import Listing, Provided, Row
from slime.plugin import API_VERSION
from slime.plugins import Component, LoadedPlugin, PluginFailure, PluginSet, survey_plugins
from slime.plugins.find import FoundPlugin, find_plugins
from slime.plugins.kinds import KINDS

_COLUMNS = ("PLUGIN", "VERSION", "API", "STATUS", "PROVIDES", "FROM")


@dataclass(frozen=True)
class Table:
    """What is installed, ready to print."""

    content: Listing
    #: behind the rows, in their order
    found: list[FoundPlugin]
    failures: tuple[PluginFailure, ...] = field(default=())

    @property
    def trouble(self) -> bool:
        """Whether a plugin is broken or a name of it clashes."""
        return any(row.status in ("broken", "clash") for row in self.content.plugins)

    def json(self) -> str:
        """As `--json` prints it."""
        return self.content.model_dump_json(indent=2)

    def text(self, *, verbose: bool = False) -> str:
        """As people read it."""
        rows = self.content.plugins
        parts = [aligned([_COLUMNS, *map(_cells, rows)]), "", _count(rows)]
        parts += [f"{row.plugin}: {row.remedy}" for row in rows if row.remedy]
        parts += self.content.notes
        if verbose:
            parts += ["", aligned([("PLUGIN", "ENTRY POINT", "SOURCE"), *map(_where, self.found)])]
            parts += map(_traceback, self.failures)
        return "\n".join(parts)


def listing(*, kind: str | None = None, load: bool = True) -> Table:
    """Every plugin with components of `kind` (None: any), and every broken one.

    load    False: from metadata alone, so that no plugin's code runs
    """
    if not load:
        found = find_plugins()
        return Table(_content([Row(**_identity(plugin), status="not loaded") for plugin in found]), found)
    plugins = survey_plugins()
    shown = [plugin for plugin in plugins.plugins if kind is None or any(c.kind == kind for c in plugin.components)]
    rows = [_working(plugin, plugins, kind) for plugin in shown] + [_broken(failure) for failure in plugins.failures]
    return Table(
        _content(rows, plugins.registry.clashes()),
        [plugin.found for plugin in shown] + [failure.found for failure in plugins.failures],
        plugins.failures,
    )


def _content(rows: list[Row], notes: list[str] | None = None) -> Listing:
    return Listing(slime=__version__, api=API_VERSION, plugins=rows, notes=notes or [])


# --- rows --------------------------------------------------------------------------------------------


def _working(plugin: LoadedPlugin, plugins: PluginSet, kind: str | None) -> Row:
    provides = [_provided(component, plugins) for component in plugin.components if kind in (None, component.kind)]
    return Row(
        **_identity(plugin.found),
        status="clash" if any(component.clash for component in provides) else "ok",
        api=plugin.api,
        provides=provides,
        hooks=_hooks(plugin),
    )


def _broken(failure: PluginFailure) -> Row:
    return Row(
        **_identity(failure.found), status="broken", api=failure.api, problem=failure.problem, remedy=failure.remedy
    )


def _identity(found: FoundPlugin) -> dict[str, Any]:
    return {
        "plugin": found.name,
        "distribution": found.distribution,
        "version": found.version,
        "entry": found.entry,
        "built_in": found.own,
    }


def _provided(component: Component, plugins: PluginSet) -> Provided:
    return Provided(
        kind=component.kind,
        name=component.name,
        id=component.id,
        summary=component.spec.summary,
        factory=component.spec.factory,
        origin=component.origin,
        docs=component.spec.docs,
        requires=list(component.spec.requires),
        clash=plugins.registry.bearers(component.kind, component.name) != [component],
    )


def _hooks(plugin: LoadedPlugin) -> list[str]:
    registration = {kind.hook for kind in KINDS.values()}
    hooks = {
        (member.slime_impl.get("specname") or name)
        for name, member in vars(plugin.module).items()
        if inspect.isroutine(member) and hasattr(member, "slime_impl")
    }
    return sorted(hooks - registration)


# --- text --------------------------------------------------------------------------------------------


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.plugin,
        row.version,
        "-" if row.api is None else str(row.api),
        row.status,
        folded(row.problem.split() if row.problem else _provides(row).split()),
        f"{row.distribution} (built in)" if row.built_in else row.distribution,
    )


def _provides(row: Row) -> str:
    """`reward boxed, exact; generator tools; hook step_finished`."""
    groups = [
        f"{KINDS[kind].title} {', '.join(component.name for component in components)}"
        for kind, components in groupby(row.provides, key=lambda component: component.kind)
    ]
    hooks = [name.removeprefix("slime_") for name in row.hooks]
    return "; ".join([*groups, *([f"hook {', '.join(hooks)}"] if hooks else [])]) or "-"


def _count(rows: list[Row]) -> str:
    counts = [f"{len(rows)} plugin{'s' if len(rows) != 1 else ''}"]
    for status in ("broken", "clash"):
        number = sum(row.status == status for row in rows)
        counts += [f"{number} {status}"] if number else []
    return ", ".join(counts)


def _where(found: FoundPlugin) -> tuple[str, str, str]:
    # Asks git; only a verbose listing does.
    from slime.cli.plugins.origin import describe_source

    return found.name, found.entry, describe_source(found)


def _traceback(failure: PluginFailure) -> str:
    text = "".join(traceback.format_exception(failure.exception)) if failure.exception else ""
    return f"\n--- {failure.found.name} ({failure.found.package}), entry point {failure.found.entry}\n{text}".rstrip()
