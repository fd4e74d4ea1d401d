"""Calls hooks of one plugin at a time, so that an error is attributed to its plugin; calls the observer hooks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pluggy

from slime.errors.raised import report
from slime.registry.find import FoundPlugin

logger = logging.getLogger("slime.registry")


def hook_of(manager: pluggy.PluginManager, hook: str, plugin: str) -> pluggy.HookCaller:
    """A caller that calls a hook of one plugin only."""
    return manager.subset_hook_caller(hook, [module for name, module in manager.list_name_plugin() if name != plugin])


class Observers:
    """Calls the observer hooks (`slime_run_started`, `slime_step_finished`, ...) of every plugin.

    What a plugin raises is reported once, counted, and never ends the run.
    """

    def __init__(self, manager: pluggy.PluginManager, plugins: Sequence[FoundPlugin]) -> None:
        self._manager = manager
        self._plugins = plugins
        #: (plugin, hook) -> how often it raised
        self.failures: Counter[tuple[str, str]] = Counter()

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        """Call `hook` of every plugin that has it, in the order in which plugins are listed; what they returned."""
        results: list[Any] = []
        for found in self._plugins:
            try:
                results += hook_of(self._manager, hook, found.name)(**arguments)
            except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - the boundary around an observer
                self._report(found, hook, error)
        return results

    def _report(self, found: FoundPlugin, hook: str, error: BaseException) -> None:
        self.failures[found.name, hook] += 1
        if self.failures[found.name, hook] == 1:
            where = f"{hook}() of plugin {found.name} ({found.package})"
            logger.warning("%s\n  The run continues, and later failures are only counted.", report(where, error))
