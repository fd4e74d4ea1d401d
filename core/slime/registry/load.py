"""Loads plugins one by one, so that a broken plugin does not affect the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import pluggy

from slime.errors import one_line
from slime.errors.raised import Raised
from slime.registry.component import Component, remedy_for
from slime.registry.find import FoundPlugin
from slime.registry.validate import Defect, check_api, check_hooks, check_plugin_name, collect_components


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """A plugin with a valid module and valid specs; none of its components has been built."""

    found: FoundPlugin
    module: ModuleType = field(compare=False, repr=False)
    api: int
    components: tuple[Component, ...]


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A broken plugin."""

    found: FoundPlugin
    #: what is wrong, in one line
    problem: str
    remedy: str
    #: its `slime_api`, if that was read and is a whole number
    api: int | None = None
    exception: BaseException | None = field(default=None, compare=False, repr=False)

    @property
    def advice(self) -> str:
        """Problem and remedy, as sentences."""
        return f"{self.problem}{'' if self.problem.endswith('?') else '.'} {self.remedy}"

    def __str__(self) -> str:
        return f"plugin {self.found.name} ({self.found.package}) is broken: {self.advice}"


def load_each(
    plugins: Sequence[FoundPlugin], manager: pluggy.PluginManager
) -> tuple[list[LoadedPlugin], list[PluginFailure]]:
    """Import, validate and register every plugin. What a plugin raises becomes its failure."""
    by_name: dict[str, list[FoundPlugin]] = defaultdict(list)
    for found in plugins:
        by_name[found.name].append(found)
    loaded: list[LoadedPlugin] = []
    failures: list[PluginFailure] = []
    for found in plugins:
        rivals = [other for other in by_name[found.name] if other is not found]
        if rivals and not found.own:
            failures.append(_same_id(found, rivals))
            continue
        result = _load(found, manager)
        if isinstance(result, LoadedPlugin):
            loaded.append(result)
        else:
            failures.append(result)
    return loaded, failures


def _load(found: FoundPlugin, manager: pluggy.PluginManager) -> LoadedPlugin | PluginFailure:
    """Load one plugin; what it raises becomes a failure."""
    api: int | None = None
    try:
        check_plugin_name(found)
        module = found.entry_point.load()
        if not isinstance(module, ModuleType):
            raise Defect(f"its entry point {found.entry} names a {type(module).__name__}, expected a module")
        stated = getattr(module, "slime_api", None)
        api = stated if type(stated) is int else None
        checked_api = check_api(stated, found)
        check_hooks(module, manager)
        manager.register(module, found.name)
        try:
            components = collect_components(found, manager)
        except BaseException:
            manager.unregister(name=found.name)
            raise
    except Defect as defect:
        return PluginFailure(found, str(defect), defect.remedy or remedy_for(found), api, defect)
    except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - the boundary around a plugin's import
        return PluginFailure(found, _cause(error, found), remedy_for(found, error), api, error)
    return LoadedPlugin(found, module, checked_api, components)


def _cause(error: BaseException, found: FoundPlugin) -> str:
    if isinstance(error, SystemExit):
        return f"it ends the process when it is loaded ({Raised.of(error)})"
    module = found.entry.partition(":")[0].strip()
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return f"its entry point names the module {module}, which is not there ({one_line(error)})"
    return str(Raised.of(error))


def _same_id(found: FoundPlugin, rivals: Sequence[FoundPlugin]) -> PluginFailure:
    others = " and ".join(sorted(rival.distribution for rival in rivals))
    return PluginFailure(
        found,
        f"its id {found.name} is also the id of a plugin of {others}",
        f'Uninstall one of them, or write [plugins] deny = ["{found.distribution}"].',
    )
