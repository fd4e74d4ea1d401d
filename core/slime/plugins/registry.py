"""Names to components.  A clash is never settled silently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slime.errors import ConfigError, PluginConflictError, PluginLoadError, PluginNotFoundError, did_you_mean
from slime.plugins.choose import SkippedPlugin
from slime.plugins.component import Component
from slime.plugins.kinds import KINDS, Kind
from slime.plugins.load import PluginFailure
from slime.plugins.local import find_local, is_local


@dataclass(frozen=True)
class Registry:
    """All components that loaded, and what is known of plugins that did not."""

    components: tuple[Component, ...]
    failures: tuple[PluginFailure, ...] = ()
    skipped: tuple[SkippedPlugin, ...] = ()

    def of_kind(self, kind: str) -> list[Component]:
        """Every component of a kind, slime's own first."""
        return [component for component in self.components if component.kind == kind]

    def find(self, kind: str, name: str) -> Component:
        """The component called `name` or `PLUGIN/NAME`, or the function of a user's own that `local:...` names.

        Bare names of slime's own components mean those always.  Raises `PluginConflictError` for a bare name
        that several plugins have, `PluginLoadError` for one of a broken plugin, else `PluginNotFoundError`.
        """
        if is_local(name):
            return find_local(kind, name)
        if kind not in KINDS:
            raise ConfigError(f"there is no component kind {kind!r}.{did_you_mean(kind, KINDS)}")
        known = self.of_kind(kind)
        if "/" in name:
            matches = [component for component in known if component.id == name]
        else:
            matches = self.bearers(kind, name)
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise PluginConflictError(f"{KINDS[kind].title} {name!r} is ambiguous: {_choices(matches)}")
        raise self._not_found(KINDS[kind], name, known)

    def bearers(self, kind: str, name: str) -> list[Component]:
        """What the bare name may mean: one component, or several that clash."""
        matches = [component for component in self.of_kind(kind) if component.name == name]
        return [component for component in matches if component.found.own] or matches

    def clashes(self) -> list[str]:
        """Every bare name that does not reach all who bear it, in words."""
        texts = []
        for kind, name in dict.fromkeys((component.kind, component.name) for component in self.components):
            everyone = [component for component in self.of_kind(kind) if component.name == name]
            if len(everyone) > 1:
                bearers = self.bearers(kind, name)
                others = [component for component in everyone if component not in bearers]
                meaning = f"means {bearers[0].id}" if len(bearers) == 1 else "is ambiguous"
                texts.append(f"{KINDS[kind].title} {name!r} {meaning}: {_choices(others or bearers)}")
        return texts

    def _not_found(self, kind: Kind, name: str, known: Sequence[Component]) -> PluginLoadError:
        plugin = name.partition("/")[0] if "/" in name else None
        for failure in self.failures:
            if failure.found.name == plugin:
                return PluginLoadError(
                    f"{kind.title} {name} comes from {failure.found.package}, which cannot be used: {failure.told}"
                )
        for skipped in self.skipped:
            if skipped.found.name == plugin:
                return PluginNotFoundError(
                    f"{kind.title} {name} comes from {skipped.found.package}, which is installed but not loaded:"
                    f" {skipped.reason}."
                )
        names = [component.id if "/" in name else component.name for component in known]
        installed = ", ".join(dict.fromkeys(component.name for component in known)) or "none"
        message = (
            f"{kind.title} {name!r} is not installed.{did_you_mean(name, names)} Installed: {installed}."
            f" They come from pip packages named {kind.packages}; `slime plugins` lists what is there."
        )
        not_loaded = [*map(str, self.failures), *(f"{s.found.name} is not loaded: {s.reason}." for s in self.skipped)]
        if not_loaded:
            message += f" Perhaps it belongs to one of these: {' '.join(not_loaded)}"
        return PluginNotFoundError(message)


def _choices(components: Iterable[Component]) -> str:
    return "write " + " or ".join(f"{component.id} (of {component.distribution})" for component in components)
