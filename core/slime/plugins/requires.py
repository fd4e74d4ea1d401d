"""Are the packages there that a component needs beyond its own package's dependencies?"""

from __future__ import annotations

from collections.abc import Sequence

import importlib_metadata

from slime.errors import PluginLoadError
from slime.plugins.component import Component


def check_requires(component: Component) -> None:
    """Raise `PluginLoadError` with the command that helps, unless everything in `spec.requires` is installed."""
    unmet = unmet_requirements(component)
    if unmet:
        needs = " and ".join(f"{requirement} ({state})" for requirement, state in unmet)
        install = " ".join(f'"{requirement}"' for requirement, _ in unmet)
        raise PluginLoadError(f"{component.title} needs {needs}. Try: pip install {install}")


def unmet_requirements(component: Component) -> list[tuple[str, str]]:
    """(requirement, what is there instead) of each that is not met.  Markers that do not hold here need nothing."""
    return [(text, state) for text in component.spec.requires for state in [_state(text)] if state is not None]


def malformed(requirements: Sequence[object]) -> str | None:
    """The first entry that is no PEP 508 requirement, and why; None where all are."""
    # Parsing them costs more than everything else about a spec, and few specs have any.
    from packaging.requirements import InvalidRequirement, Requirement

    for text in requirements:
        try:
            Requirement(text if isinstance(text, str) else "")
        except InvalidRequirement as error:
            return f"{text!r}: {str(error).splitlines()[0]}"
    return None


def _state(text: str) -> str | None:
    from packaging.requirements import Requirement

    wanted = Requirement(text)
    if wanted.marker is not None and not wanted.marker.evaluate():
        return None
    try:
        version = importlib_metadata.version(wanted.name)
    except importlib_metadata.PackageNotFoundError:
        return "not installed"
    return None if wanted.specifier.contains(version, prereleases=True) else f"{version} is installed"
