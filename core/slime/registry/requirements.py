"""Requirements in the format of PEP 508: which are malformed, and which are not met here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import importlib_metadata

from slime.errors import PluginLoadError

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def parse_requirement(text: object) -> Requirement:
    """Parse a requirement.

    Raises:
        ValueError: It is malformed; the message shows it and says why.
    """
    # Importing this takes longer than everything else about a spec, and few specs have requirements.
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
