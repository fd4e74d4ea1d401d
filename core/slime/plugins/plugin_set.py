"""The plugins of one process, loaded once and frozen."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from slime import hookspecs
from slime.errors import PluginConflictError, PluginError, PluginLoadError, SlimeError
from slime.plugin import Context, Options
from slime.plugins.choose import Everything, PluginChoice, SkippedPlugin, check_requirements, choose_plugins
from slime.plugins.component import Component, describe
from slime.plugins.component_options import checked_options
from slime.plugins.factory_check import check_factory
from slime.plugins.find import find_plugins
from slime.plugins.load import LoadedPlugin, PluginFailure, load_each
from slime.plugins.local import is_local
from slime.plugins.observers import Observers
from slime.plugins.provenance import fingerprint_of, provenance_of
from slime.plugins.registry import Registry
from slime.plugins.requires import check_requires
from slime.plugins.resolve import Resolved, Use, check_critic_options, check_needs, components_used
from slime.plugins.resume import check_saved

if TYPE_CHECKING:
    from slime.config import RunConfig

logger = logging.getLogger("slime.plugins")


@dataclass(frozen=True)
class PluginSet:
    """What is installed and usable here.  Every process loads its own; `fingerprint` compares them."""

    #: plugins that work, slime's own first, then by distribution and id
    plugins: tuple[LoadedPlugin, ...]
    #: plugins that do not
    failures: tuple[PluginFailure, ...]
    #: plugins that were not to be loaded
    skipped: tuple[SkippedPlugin, ...]
    #: names to components
    registry: Registry
    #: calls the observer hooks of every plugin
    observers: Observers
    #: whether a difference that could be overlooked is an error
    strict: bool
    _manager: pluggy.PluginManager

    # --- components --------------------------------------------------------------------------------

    def find(self, kind: str, name: str) -> Component:
        """The component called `name` (while that is unique) or `PLUGIN/NAME`.

        Raises `PluginNotFoundError`, `PluginConflictError`, or `PluginLoadError` where its plugin is broken.
        """
        return self.registry.find(kind, name)

    def components(self, kind: str | None = None) -> list[Component]:
        """Every component, or those of one kind."""
        return [c for c in self.registry.components if kind is None or c.kind == kind]

    def check_options(self, kind: str, name: str, options: Mapping[str, Any]) -> Options:
        """The options model of a component.  Raises `ConfigError` that names component and option."""
        return checked_options(self.find(kind, name), options)[0]

    def build(self, kind: str, name: str, options: Mapping[str, Any], context: Context) -> Any:
        """Import a component's class and make `Class(options, context)`.

        Raises as `find` and `check_options` do, `PluginLoadError` where the class cannot be imported or
        made, and `PluginContractError` where its object lacks a method of the contract.
        """
        component = self.find(kind, name)
        return component.build(checked_options(component, options)[0], context)

    # --- a run ---------------------------------------------------------------------------------------

    def resolve(self, config: RunConfig) -> dict[str, Resolved]:
        """Slot -> the component that the run uses, with checked options.  Imports nothing heavy.

        Raises as `resolve_use` does, for the first component that cannot be used, and `ConfigError` for options of a
        critic that none of them needs.
        """
        used = {use.slot: self.resolve_use(use, config) for use in components_used(config)}
        check_critic_options([one.component for one in used.values()], config)
        return used

    def resolve_use(self, use: Use, config: RunConfig) -> Resolved:
        """One component that the run uses, with checked options.

        Raises `PluginLoadError` for a component that is missing, ambiguous or broken (also where its source
        shows that its class is missing or could not be imported, or where a package is missing that it requires),
        `ConfigError` for wrong options and for a need that the run does not meet.
        """
        resolved = self.look_up(use)
        check_requires(resolved.component)
        check_factory(resolved.component)
        check_needs(resolved.component, config)
        return resolved

    def look_up(self, use: Use) -> Resolved:
        """The component that a configuration names, with checked options; raises as `resolve` does."""
        component = self.find(use.kind, use.name)
        return Resolved(use, component, *checked_options(component, use.options))

    def build_used(self, resolved: Resolved, context: Context) -> Any:
        """The object of a component that the run uses; raises as `build` does."""
        return resolved.component.build(resolved.options, context)

    def check_config(self, config: RunConfig) -> None:
        """Let every plugin look at the configuration (`slime_check_config`); the first refusal is raised.

        An error of a plugin that is not meant for the user becomes a `PluginError` that names it where the run uses the
        plugin, and else a warning.
        """
        implementations = self._manager.hook.slime_check_config.get_hookimpls()
        for plugin in self.plugins:
            for implementation in implementations:
                if implementation.plugin is not plugin.module:
                    continue
                try:
                    implementation.function(**({"config": config} if implementation.argnames else {}))
                except SlimeError:
                    raise
                except (Exception, SystemExit) as error:
                    told = (
                        f"slime_check_config() of plugin {plugin.found.name} ({plugin.found.package}) raised"
                        f" {describe(error)}"
                    )
                    if any(self.find(use.kind, use.name).found == plugin.found for use in components_used(config)):
                        raise PluginError(told) from error
                    logger.warning("%s; this run does not use the plugin and goes on", told)

    def provenance(self, config: RunConfig) -> dict[str, Any]:
        """The content of `plugins.json`: the loaded plugins, and the used components with their options."""
        return provenance_of(self.plugins, self.resolve(config))

    def check_resume(self, saved: Mapping[str, Any], config: RunConfig) -> None:
        """Compare with the `plugins.json` of a checkpoint that `config` continues.

        Differences are warnings, but for components that are missing now (`PluginNotFoundError`) and, when plugins
        are strict, for other code (`PluginLoadError`).
        """
        for difference in check_saved(saved, self.provenance(config), self.find, strict=self.strict):
            logger.warning("%s", difference)

    def fingerprint(self, config: RunConfig | None = None) -> str:
        """Equal in two processes that loaded the same plugins and, of a run, have the same files of the user's own.

        Raises as `find` does for a file that is not here.
        """
        uses = components_used(config) if config is not None else []
        return fingerprint_of(self.plugins, [self.find(use.kind, use.name) for use in uses if is_local(use.name)])


def load_plugins(options: PluginChoice) -> PluginSet:
    """Load what the `[plugins]` section allows.

    A broken plugin is a warning until something uses it.  Raises `PluginLoadError` for an unmet `require`,
    `ConfigError` for an `allow` that names nothing, and when `strict`, `PluginLoadError` for any broken
    plugin and `PluginConflictError` for any clash.
    """
    plugins = survey_plugins(options)
    if options.strict and plugins.failures:
        raise PluginLoadError("[plugins] strict is on, and " + "; ".join(map(str, plugins.failures)))
    clashes = plugins.registry.clashes()
    if options.strict and clashes:
        raise PluginConflictError("[plugins] strict is on, and " + "; ".join(clashes))
    for failure in plugins.failures:
        logger.warning("%s It is only a problem for runs that use it.", failure)
    return plugins


def survey_plugins(options: PluginChoice | None = None) -> PluginSet:
    """As `load_plugins`, without complaints about broken or clashing plugins: for looking at them."""
    choice = Everything() if options is None else options
    found = find_plugins()
    check_requirements(found, choice.require)
    chosen, skipped = choose_plugins(found, choice)
    manager = pluggy.PluginManager("slime")
    manager.add_hookspecs(hookspecs)
    loaded, failures = load_each(chosen, manager)
    return PluginSet(
        plugins=tuple(loaded),
        failures=tuple(failures),
        skipped=tuple(skipped),
        registry=Registry(
            tuple(component for plugin in loaded for component in plugin.components), tuple(failures), tuple(skipped)
        ),
        observers=Observers(manager, [plugin.found for plugin in loaded]),
        strict=choice.strict,
        _manager=manager,
    )
