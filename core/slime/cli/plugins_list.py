"""`slime plugins`: lists the installed plugins."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from slime import __version__
from slime.cli.plugins_json import Listing, Provided, Row
from slime.cli.text_layout import count, table
from slime.plugin import API_VERSION
from slime.registry.component import Component
from slime.registry.find import FoundPlugin, find_plugins
from slime.registry.kinds import KINDS
from slime.registry.load import LoadedPlugin, PluginFailure
from slime.registry.plugin_set import PluginSet, survey_plugins


@dataclass(frozen=True)
class Installed:
    """The installed plugins, ready to print."""

    content: Listing
    #: the plugins of the rows, in the same order
    found: list[FoundPlugin]
    failures: tuple[PluginFailure, ...] = ()

    @property
    def has_problems(self) -> bool:
        """Whether a plugin is broken or one of its names clashes."""
        return any(row.status in ("broken", "clash") for row in self.content.plugins)

    def text(self, *, verbose: bool) -> str:
        """The table, followed by advice on problems; `verbose` adds sources and tracebacks."""
        rows = self.content.plugins
        parts = [table(("PLUGIN", "VERSION", "API", "STATUS", "PROVIDES", "FROM"), map(_cells, rows)), ""]
        numbers = [(status, sum(row.status == status for row in rows)) for status in ("broken", "clash")]
        parts.append(", ".join([count(len(rows), "plugin"), *(f"{n} {status}" for status, n in numbers if n)]))
        parts += [f"{row.plugin}: {row.remedy}" for row in rows if row.remedy]
        parts += self.content.notes
        if verbose:
            # It calls git for editable installs, which is slow.
            from slime.cli.plugins_show import source_text

            sources = [(found.name, found.entry, source_text(found)) for found in self.found]
            parts += ["", table(("PLUGIN", "ENTRY POINT", "SOURCE"), sources)]
            parts += map(_traceback, self.failures)
        return "\n".join(parts)


def installed(*, kind: str | None = None, load: bool = True) -> Installed:
    """The plugins with components of `kind` (None: all), and all broken ones.

    If `load` is false, only metadata is read, and no plugin's code runs.
    """
    if not load:
        found = find_plugins()
        return Installed(_listing([_row(plugin, status="not loaded") for plugin in found]), found)
    plugins = survey_plugins()
    shown = [plugin for plugin in plugins.plugins if kind is None or any(c.kind == kind for c in plugin.components)]
    rows = [_working(plugin, plugins, kind) for plugin in shown]
    rows += [
        _row(broken.found, status="broken", api=broken.api, problem=broken.problem, remedy=broken.remedy)
        for broken in plugins.failures
    ]
    found = [plugin.found for plugin in shown] + [broken.found for broken in plugins.failures]
    return Installed(_listing(rows, plugins.clashes()), found, plugins.failures)


def _listing(rows: list[Row], notes: list[str] | None = None) -> Listing:
    return Listing(slime=__version__, api=API_VERSION, plugins=rows, notes=notes or [])


def _row(found: FoundPlugin, **known: Any) -> Row:
    return Row.model_validate({**found.identity, "built_in": found.own, **known})


def _working(plugin: LoadedPlugin, plugins: PluginSet, kind: str | None) -> Row:
    provides = [_provided(component, plugins) for component in plugin.components if kind in (None, component.kind)]
    return _row(
        plugin.found,
        status="clash" if any(component.clash for component in provides) else "ok",
        api=plugin.api,
        provides=provides,
        hooks=plugins.other_hooks(plugin),
    )


def _provided(component: Component, plugins: PluginSet) -> Provided:
    spec = component.spec
    return Provided(
        kind=component.kind,
        name=component.name,
        id=component.id,
        summary=spec.summary,
        factory=spec.factory,
        origin=component.origin,
        docs=spec.docs,
        requires=list(spec.requires),
        clash=plugins.bearers(component.kind, component.name) != [component],
    )


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
