"""What is installed, from metadata alone: nothing is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol

import importlib_metadata

#: the entry-point group of plugins
GROUP = "slime"
#: the distribution that this package and its own plugins come in
OWN_DISTRIBUTION = "slime-rl"


class MetadataReader(Protocol):
    """A distribution's metadata files, such as `RECORD`."""

    def read_text(self, filename: str, /) -> str | None:
        """The file's text; None where there is none."""


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
    metadata: MetadataReader = field(compare=False, repr=False)

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
                found[key] = FoundPlugin(entry.name, entry.value, name, version, entry, distribution)
    return sorted(found.values(), key=lambda plugin: (not plugin.own, canonical(plugin.distribution), plugin.name))


def canonical(name: str) -> str:
    """A distribution's name as PEP 503 compares them."""
    return re.sub(r"[-_.]+", "-", name).lower()
