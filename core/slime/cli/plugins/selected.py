"""Which components an id on the command line means."""

from __future__ import annotations

from slime.errors import PluginConflictError, PluginLoadError, PluginNotFoundError, did_you_mean
from slime.plugins import Component, PluginSet
from slime.plugins.find import canonical
from slime.plugins.kinds import KINDS


def selected(plugins: PluginSet, name: str, kind: str | None) -> list[Component]:
    """The components called `name`: NAME, PLUGIN/NAME, and the id or package of a plugin, which means all of it.

    kind    of components; None: any

    Raises `PluginLoadError` for the name of a broken plugin, `PluginConflictError` for an ambiguous one,
    `PluginNotFoundError` with the nearest where nothing has it.
    """
    found: list[Component] = []
    for candidate in (kind,) if kind else KINDS:
        try:
            found.append(plugins.find(candidate, name))
        except PluginConflictError:
            raise
        except PluginNotFoundError:
            continue
    found += [
        component
        for component in plugins.components(kind)
        if component not in found and (name == component.plugin or canonical(name) == canonical(component.distribution))
    ]
    if found:
        return found
    for failure in plugins.failures:
        if name == failure.found.name or canonical(name) == canonical(failure.found.distribution):
            raise PluginLoadError(str(failure))
    of_kind = f"{KINDS[kind].title} or plugin" if kind else "component or plugin"
    known = {spelling for c in plugins.components(kind) for spelling in (c.id, c.name, c.plugin, c.distribution)}
    raise PluginNotFoundError(
        f"no {of_kind} is called {name!r}.{did_you_mean(name, known)} `slime plugins` lists them."
    )
