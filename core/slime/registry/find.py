"""What package metadata says: the installed plugins, those that a run may load, and requirements that are not met.

Imports no plugin.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

import importlib_metadata

from slime.errors import ConfigError, PluginLoadError, did_you_mean

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from slime.config import PluginOptions

#: the entry-point group of plugins
GROUP = "slime"
#: the distribution that this package and its own plugins come in
OWN_DISTRIBUTION = "slime-rl"
logger = logging.getLogger("slime.registry")


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
    #: of a user's own file, which belongs to no distribution
    file_sha256: str | None = None

    @property
    def own(self) -> bool:
        """Whether it comes with slime itself."""
        return canonical(self.distribution) == OWN_DISTRIBUTION

    @property
    def package(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}"

    @property
    def direct_url(self) -> dict[str, Any]:
        """Where the package was installed from, if that is known (PEP 610)."""
        text = None if self.entry_point.dist is None else self.entry_point.dist.read_text("direct_url.json")
        stated: dict[str, Any] = json.loads(text or "{}")
        return stated

    @property
    def editable_folder(self) -> Path | None:
        """The folder of a package that is installed in editable mode."""
        stated = self.direct_url
        return Path(unquote(urlparse(stated["url"]).path)) if stated.get("dir_info", {}).get("editable") else None

    @property
    def contact(self) -> str:
        """` (https://...)`: the first address that its metadata gives, or an empty text."""
        urls = [] if self.entry_point.dist is None else self.entry_point.dist.metadata.get_all("Project-URL") or []
        return f" ({urls[0].partition(',')[2].strip()})" if urls else ""

    def is_called(self, *names: str) -> bool:
        """Whether one of the names is its id or its distribution."""
        return any(name == self.name or canonical(name) == canonical(self.distribution) for name in names)

    @property
    def identity(self) -> dict[str, str]:
        """The fields that identify it in JSON."""
        return {
            "plugin": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "entry": self.entry,
        }


def find_plugins() -> list[FoundPlugin]:
    """Every installed plugin: slime's own first, then by distribution and name.

    Of a distribution that is on the path twice, only the first counts: that is the one Python imports.
    """
    entries: dict[importlib_metadata.Distribution, list[importlib_metadata.EntryPoint]] = {}
    for entry in importlib_metadata.entry_points(group=GROUP):
        assert entry.dist is not None  # it is set by `entry_points`
        entries.setdefault(entry.dist, []).append(entry)
    found = []
    for distribution, points in entries.items():
        metadata = distribution.metadata  # parsed from the file each time, so once for all plugins of a distribution
        name, version = metadata["Name"], metadata["Version"]
        found += [FoundPlugin(entry.name, entry.value, name, version, entry) for entry in points]
    return sorted(found, key=lambda plugin: (not plugin.own, canonical(plugin.distribution), plugin.name))


def canonical(name: str) -> str:
    """A distribution's name in the normal form of PEP 503."""
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


# --- requirements in the format of PEP 508 ----------------------------------------------------------

#: `NAME`, or `NAME>=1.2,<2`: what most specs have, and always well-formed
_PLAIN = re.compile(
    r"[A-Za-z0-9]+([._-][A-Za-z0-9]+)*((?:>=|<=|==|!=|<|>)\d+(\.\d+)*(,(?:>=|<=|==|!=|<|>)\d+(\.\d+)*)*)?"
)


def check_requirement(text: object) -> None:
    """Check a requirement. Raises `ValueError` as `parse_requirement` does."""
    if not (isinstance(text, str) and _PLAIN.fullmatch(text)):
        parse_requirement(text)


def parse_requirement(text: object) -> Requirement:
    """Parse a requirement.

    Raises:
        ValueError: It is malformed; the message shows it and says why.
    """
    # Importing this takes longer than everything else about a plugin.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(text if isinstance(text, str) else "")
    except InvalidRequirement as error:
        raise ValueError(f"{text!r}: {str(error).splitlines()[0]}") from None


def unmet_requirements(requirements: Iterable[str]) -> dict[str, str]:
    """The requirements that are not met, each with what is installed instead. Those of other platforms are skipped."""
    unmet: dict[str, str] = {}
    for text in requirements:
        wanted = parse_requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        try:
            version = importlib_metadata.version(wanted.name)
        except importlib_metadata.PackageNotFoundError:
            unmet[text] = "not installed"
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            unmet[text] = f"{version} is installed"
    return unmet


def check_installed(requirements: Iterable[str], who: str) -> None:
    """Raise `PluginLoadError`, with the command to run, unless all requirements of `who` are met."""
    if unmet := unmet_requirements(requirements):
        needs = " and ".join(f"{requirement} ({state})" for requirement, state in unmet.items())
        install = " ".join(f'"{requirement}"' for requirement in unmet)
        raise PluginLoadError(f"{who} needs {needs}. Try: pip install {install}")
