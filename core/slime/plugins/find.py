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

    def is_called(self, *names: str) -> bool:
        """Whether one of the names is its id or that of its distribution."""
        return any(name == self.name or canonical(name) == canonical(self.distribution) for name in names)

    @property
    def identity(self) -> dict[str, str]:
        """What identifies it in JSON."""
        return {
            "plugin": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "entry": self.entry,
        }


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


def choose_plugins(found: Sequence[FoundPlugin], options: PluginOptions) -> dict[FoundPlugin, str]:
    """The plugins that the `[plugins]` section leaves out, each with the reason.

    Plugins are named by id or by distribution. `deny` wins over everything; slime's own plugins load unless
    denied; third-party ones load when `allow` names them, or when there is no `allow` and `autoload` is on.

    Raises:
        ConfigError: `allow` names what is not installed. (Such a name in `deny` is a warning.)
    """
    for name in options.allow or ():
        if not any(plugin.is_called(name) for plugin in found):
            raise ConfigError(f"[plugins] allow names {name!r}, which is not installed.{_near(name, found)}")
    for name in options.deny:
        if not any(plugin.is_called(name) for plugin in found):
            logger.warning("[plugins] deny names %r, which is not installed.%s", name, _near(name, found))
    reasons = ((plugin, _why_not(plugin, options)) for plugin in found)
    return {plugin: reason for plugin, reason in reasons if reason is not None}


def check_requirements(found: Iterable[FoundPlugin], require: Sequence[str]) -> None:
    """Raise `PluginLoadError` unless every requirement is met by the distribution of an installed plugin."""
    if not require:  # importing `packaging` would take time for nothing
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


def _why_not(plugin: FoundPlugin, options: PluginOptions) -> str | None:
    if plugin.is_called(*options.deny):
        return "[plugins] deny names it"
    if plugin.own or plugin.is_called(*options.allow or ()):
        return None
    if options.allow is not None:
        return "[plugins] allow does not name it"
    return None if options.autoload else "[plugins] autoload is off"


def _near(name: str, found: Sequence[FoundPlugin]) -> str:
    return did_you_mean(name, {plugin.name for plugin in found} | {plugin.distribution for plugin in found})
