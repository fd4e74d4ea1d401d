"""What is installed, from metadata alone, and which of it a run may load. Nothing is imported."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import importlib_metadata

from slime.errors import ConfigError, PluginLoadError, did_you_mean

if TYPE_CHECKING:
    from slime.config import PluginOptions

#: the entry-point group of plugins
GROUP = "slime"
#: the distribution that this package and its own plugins come in
OWN_DISTRIBUTION = "slime-rl"
logger = logging.getLogger("slime.plugins")


@dataclass(frozen=True, slots=True)
class FoundPlugin:
    """One entry point in group `slime`."""

    #: the plugin's id: the name of its entry point
    name: str
    #: the module it names
    entry: str
    distribution: str
    version: str
    entry_point: importlib_metadata.EntryPoint = field(compare=False, repr=False)
    #: of a user's own file, which no distribution contains
    file_sha256: str | None = None

    @property
    def own(self) -> bool:
        """Whether it comes with slime itself."""
        return canonical(self.distribution) == OWN_DISTRIBUTION

    @property
    def package(self) -> str:
        """Distribution and version, as people write them."""
        return f"{self.distribution} {self.version}"


def find_plugins() -> list[FoundPlugin]:
    """Every installed plugin: slime's own first, then by distribution and name.

    A distribution that is on the path twice counts once: the first is the one that imports.
    """
    found: dict[tuple[str, str], FoundPlugin] = {}
    first_of: dict[str, object] = {}
    for distribution in importlib_metadata.distributions():
        # Reading the text first is what keeps this fast: most distributions have no plugin.
        text = distribution.read_text("entry_points.txt") or ""
        if not re.search(rf"^\s*\[{GROUP}\]\s*$", text, re.MULTILINE):
            continue
        name = distribution.metadata["Name"] or "unknown"
        version = distribution.metadata["Version"] or "unknown"
        if first_of.setdefault(canonical(name), distribution) is not distribution:
            continue
        for entry in distribution.entry_points:
            if entry.group == GROUP:
                key = (canonical(name), entry.name)
                found[key] = FoundPlugin(entry.name, entry.value, name, version, entry)
    return sorted(found.values(), key=lambda plugin: (not plugin.own, canonical(plugin.distribution), plugin.name))


def canonical(name: str) -> str:
    """A distribution's name as PEP 503 compares them."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True, slots=True)
class Everything:
    """All installed plugins, for commands that only look at them: the defaults of the `[plugins]` section."""

    allow: Sequence[str] | None = None
    deny: Sequence[str] = ()
    autoload: bool = True
    strict: bool = False
    require: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class SkippedPlugin:
    """An installed plugin that was not loaded, and why."""

    found: FoundPlugin
    reason: str


def choose_plugins(
    found: Sequence[FoundPlugin], options: PluginOptions | Everything
) -> tuple[list[FoundPlugin], list[SkippedPlugin]]:
    """Split `found` into plugins to load and plugins to leave alone.

    Plugins are named by id or by distribution. `deny` wins over everything; slime's own load unless
    denied; third-party ones load when `allow` names them, or when there is no `allow` and `autoload` is on.
    Raises `ConfigError` when `allow` names what is not installed; such a name in `deny` is a warning.
    """
    for name in options.allow or ():
        if not any(_named(plugin, [name]) for plugin in found):
            raise ConfigError(f"[plugins] allow names {name!r}, which is not installed.{_near(name, found)}")
    for name in options.deny:
        if not any(_named(plugin, [name]) for plugin in found):
            logger.warning("[plugins] deny names %r, which is not installed.%s", name, _near(name, found))
    chosen: list[FoundPlugin] = []
    skipped: list[SkippedPlugin] = []
    for plugin in found:
        reason = _why_not(plugin, options)
        if reason is None:
            chosen.append(plugin)
        else:
            skipped.append(SkippedPlugin(plugin, reason))
    return chosen, skipped


def check_requirements(found: Iterable[FoundPlugin], require: Sequence[str]) -> None:
    """Raise `PluginLoadError` unless every requirement is met by the distribution of an installed plugin."""
    if not require:
        return
    from packaging.requirements import InvalidRequirement, Requirement

    versions = {canonical(plugin.distribution): plugin.version for plugin in found}
    for text in require:
        try:
            wanted = Requirement(text)
        except InvalidRequirement as error:
            raise ConfigError(
                f'[plugins] require has {text!r}, expected e.g. "slime-reward-x>=0.3,<0.4": {error}'
            ) from None
        version = versions.get(canonical(wanted.name))
        if version is None:
            near = did_you_mean(canonical(wanted.name), versions)
            raise PluginLoadError(f'[plugins] require: {text} is not installed.{near} Try: pip install "{text}"')
        if not wanted.specifier.contains(version, prereleases=True):
            raise PluginLoadError(f'[plugins] require: {text}, but {version} is installed. Try: pip install "{text}"')


def _why_not(plugin: FoundPlugin, options: PluginOptions | Everything) -> str | None:
    if _named(plugin, options.deny):
        return "[plugins] deny names it"
    if plugin.own or _named(plugin, options.allow or ()):
        return None
    if options.allow is not None:
        return "[plugins] allow does not name it"
    return None if options.autoload else "[plugins] autoload is off"


def _named(plugin: FoundPlugin, names: Sequence[str]) -> bool:
    return any(name == plugin.name or canonical(name) == canonical(plugin.distribution) for name in names)


def _near(name: str, found: Sequence[FoundPlugin]) -> str:
    return did_you_mean(name, {plugin.name for plugin in found} | {plugin.distribution for plugin in found})
