"""Packages of slime's own that the kernel works without, such as the viewer: imported when they are asked for."""

from __future__ import annotations

import importlib
from types import ModuleType

from slime.errors import ConfigError


def import_shop(module: str, needed_for: str) -> ModuleType:
    """Import a module of a package beside the kernel.

    Args:
        module: Such as `slime_viewer.report`.
        needed_for: What was asked for, for the message: "`slime view`".

    Raises:
        ConfigError: The package is not installed.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(
            f"{needed_for} needs the package {package}, which is not installed here. It comes with slime-rl: install"
            " that again, with all of its packages."
        ) from None
