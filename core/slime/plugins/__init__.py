"""Installed plugins: found, chosen, loaded behind a boundary, validated, frozen, and built by name.

Discovery and registration happen once, before anything starts; the loops then call plain typed objects.
"""

from slime.plugins.component import Component
from slime.plugins.load import LoadedPlugin, PluginFailure
from slime.plugins.observers import Observers
from slime.plugins.plugin_set import PluginSet, load_plugins, survey_plugins
from slime.plugins.resolve import Resolved

__all__ = [
    "Component",
    "LoadedPlugin",
    "Observers",
    "PluginFailure",
    "PluginSet",
    "Resolved",
    "load_plugins",
    "survey_plugins",
]
