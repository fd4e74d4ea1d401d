"""Plugins that watch a run.  What they raise is reported once, counted, and never ends the run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pluggy

from slime.plugins.component import describe
from slime.plugins.find import FoundPlugin

logger = logging.getLogger("slime.plugins")


class Observers:
    """Calls the observer hooks (`slime_run_started`, `slime_step_finished`, ...) of every plugin."""

    def __init__(self, manager: pluggy.PluginManager, plugins: Sequence[FoundPlugin]) -> None:
        self._manager = manager
        self._found = {plugin.name: plugin for plugin in plugins}
        #: (plugin, hook) -> how often it raised
        self.failures: Counter[tuple[str, str]] = Counter()

    def call(self, hook: str, **arguments: Any) -> None:
        """Call `hook` of every plugin that has it, in the order of the plugins' listing.

        An implementation gets those of the arguments that it asks for.
        """
        implementations = {impl.plugin_name: impl for impl in getattr(self._manager.hook, hook).get_hookimpls()}
        for name in self._found:
            implementation = implementations.get(name)
            if implementation is None:
                continue
            wanted = (*implementation.argnames, *implementation.kwargnames)
            try:
                implementation.function(**{key: arguments[key] for key in wanted})
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary around an observer
                self._report(name, hook, error)

    def _report(self, plugin: str, hook: str, error: BaseException) -> None:
        self.failures[plugin, hook] += 1
        if self.failures[plugin, hook] == 1:
            logger.warning(
                "%s() of plugin %s (%s) raised %s; the run goes on and later failures are only counted",
                hook,
                plugin,
                self._found[plugin].package,
                describe(error),
                exc_info=error,
            )
