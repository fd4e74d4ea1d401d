"""`slime plugins`: the table of installed plugins."""

from __future__ import annotations

import inspect
import traceback
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from slime import __version__
from slime.cli.plugins_json import Listing, Provided, Row
from slime.cli.text_layout import count, table
from slime.plugin import API_VERSION
from slime.plugins import Component, LoadedPlugin, PluginFailure, PluginSet, survey_plugins
from slime.plugins.find import FoundPlugin, find_plugins
from slime.plugins.kinds import KINDS


@dataclass(frozen=True)
class Installed:
    """The installed plugins, ready to print."""

    content: Listing
    #: the packages behind the rows, in their order
    found: list[FoundPlugin]
    failures: tuple[PluginFailure, ...] = ()

    @property
    def has_problems(self) -> bool:
        """Whether a plugin is broken or one of its names clashes."""
        return any(row.status in ("broken", "clash") for row in self.content.plugins)

    def text(self, *, verbose: bool) -> str:
        """The table with what to do about problems; `verbose` adds sources and tracebacks."""
        rows = self.content.plugins
        parts = [table(("PLUGIN", "VERSION", "API", "STATUS", "PROVIDES", "FROM"), map(_cells, rows)), ""]
        numbers = [(status, sum(row.status == status for row in rows)) for status in ("broken", "clash")]
        parts.append(", ".join([count(len(rows), "plugin"), *(f"{n} {status}" for status, n in numbers if n)]))
        parts += [f"{row.plugin}: {row.remedy}" for row in rows if row.remedy]
        parts += self.content.notes
        if verbose:
            # Asks git about editable installs, which takes its time.
            from slime.cli.plugins_show import source_text

            sources = [(found.name, found.entry, source_text(found)) for found in self.found]
            parts += ["", table(("PLUGIN", "ENTRY POINT", "SOURCE"), sources)]
            parts += map(_traceback, self.failures)
        return "\n".join(parts)


def installed(*, kind: str | None = None, load: bool = True) -> Installed:
    """Every plugin with components of `kind` (None: any), and every broken one.

    With `load` false only metadata is read, and no plugin's code runs.
    """
    if not load:
        found = find_plugins()
        return Installed(_listing([Row(**_identity(plugin), status="not loaded") for plugin in found]), found)
    plugins = survey_plugins()
    shown = [plugin for plugin in plugins.plugins if kind is None or any(c.kind == kind for c in plugin.components)]
    rows = [_working(plugin, plugins, kind) for plugin in shown] + [_broken(failure) for failure in plugins.failures]
    found = [plugin.found for plugin in shown] + [failure.found for failure in plugins.failures]
    return Installed(_listing(rows, plugins.registry.clashes()), found, plugins.failures)


def _listing(rows: list[Row], notes: list[str] | None = None) -> Listing:
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
    """The hooks that a plugin implements besides those that register components."""
    registration = {kind.hook for kind in KINDS.values()}
    hooks = {
        (member.slime_impl.get("specname") or name)
        for name, member in vars(plugin.module).items()
        if inspect.isroutine(member) and hasattr(member, "slime_impl")
    }
    return sorted(hooks - registration)


# --- text --------------------------------------------------------------------------------------------


def _cells(row: Row) -> tuple[str, ...]:
    api = "-" if row.api is None else str(row.api)
    package = f"{row.distribution} (built in)" if row.built_in else row.distribution
    return row.plugin, row.version, api, row.status, row.problem or _provides(row), package


def _provides(row: Row) -> str:
    """`reward boxed, exact; generator tools; hook step_finished`."""
    groups = [
        f"{KINDS[kind].title} {', '.join(component.name for component in components)}"
        for kind, components in groupby(row.provides, key=lambda component: component.kind)
    ]
    hooks = [name.removeprefix("slime_") for name in row.hooks]
    return "; ".join([*groups, *([f"hook {', '.join(hooks)}"] if hooks else [])]) or "-"


def _traceback(failure: PluginFailure) -> str:
    text = "".join(traceback.format_exception(failure.exception)) if failure.exception else ""
    return f"\n--- {failure.found.name} ({failure.found.package}), entry point {failure.found.entry}\n{text}".rstrip()
