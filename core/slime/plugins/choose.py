"""Which of the installed plugins a run may load."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from slime.errors import ConfigError, PluginLoadError, did_you_mean
from slime.plugins.find import FoundPlugin, canonical

logger = logging.getLogger("slime.plugins")


class PluginChoice(Protocol):
    """What the `[plugins]` section says (`slime.config.plugin_options.PluginOptions`)."""

    @property
    def allow(self) -> Sequence[str] | None:
        """The only third-party plugins to load; None: all."""

    @property
    def deny(self) -> Sequence[str]:
        """Plugins never to load."""

    @property
    def autoload(self) -> bool:
        """Whether third-party plugins load without being named in `allow`."""

    @property
    def strict(self) -> bool:
        """Whether a broken or clashing plugin stops the run though it is not used."""

    @property
    def require(self) -> Sequence[str]:
        """Distributions that must be installed, as PEP 508 requirements."""


@dataclass(frozen=True, slots=True)
class Everything:
    """The choice of someone who only wants to look: all installed plugins, and no complaint."""

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
    found: Sequence[FoundPlugin], options: PluginChoice
) -> tuple[list[FoundPlugin], list[SkippedPlugin]]:
    """Split `found` into plugins to load and plugins to leave alone.

    Plugins are named by id or by distribution.  `deny` wins over everything; slime's own load unless
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


def _why_not(plugin: FoundPlugin, options: PluginChoice) -> str | None:
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
