"""Installed plugins: found, chosen, loaded behind a boundary, validated, frozen, and built by name.

Discovery and registration happen once, before anything starts; the loops then call plain typed objects.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.plugins.component import Component, LocalComponent
    from slime.plugins.load import LoadedPlugin, PluginFailure
    from slime.plugins.observers import Observers
    from slime.plugins.plugin_set import Fingerprint, PluginSet, load_plugins, survey_plugins
    from slime.plugins.resolve import Resolved

__all__ = [
    "Component",
    "Fingerprint",
    "LoadedPlugin",
    "LocalComponent",
    "Observers",
    "PluginFailure",
    "PluginSet",
    "Resolved",
    "load_plugins",
    "survey_plugins",
]

_MODULES = {
    "Component": "component",
    "LocalComponent": "component",
    "LoadedPlugin": "load",
    "PluginFailure": "load",
    "Observers": "observers",
    "Resolved": "resolve",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: a process that only loads a function by reference needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'plugin_set')}"), name)
