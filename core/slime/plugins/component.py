"""A component that a plugin provides, and where it comes from."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from slime.errors import PluginContractError, PluginLoadError, SlimeError, did_you_mean
from slime.plugin import ComponentSpec, Context, Options
from slime.plugins.find import FoundPlugin
from slime.plugins.kinds import KINDS


@dataclass(frozen=True, slots=True)
class Component:
    """One registered spec with its origin."""

    kind: str
    #: of the spec class of its kind
    spec: Any
    found: FoundPlugin
    #: "FILE:LINE" of the hook that registered it
    origin: str

    @property
    def id(self) -> str:
        """`PLUGIN/NAME`, which always finds it."""
        return f"{self.found.name}/{self.name}"

    @property
    def label(self) -> str:
        """What metrics and loggers are called after."""
        return self.id

    @property
    def name(self) -> str:
        """The bare name, which finds it while no other component of its kind has it."""
        spec: ComponentSpec = self.spec
        return spec.name

    @property
    def plugin(self) -> str:
        """Id of the plugin."""
        return self.found.name

    @property
    def distribution(self) -> str:
        """The package that pip installed."""
        return self.found.distribution

    @property
    def version(self) -> str:
        """Version of the distribution."""
        return self.found.version

    @property
    def title(self) -> str:
        """For messages: `reward math/boxed (slime-reward-math 0.3.1)`."""
        return f"{KINDS[self.kind].title} {self.id} ({self.found.package})"

    def factory(self) -> Any:
        """The class that does the work, imported now.

        Raises `PluginLoadError` where the module does not import or lacks the class.
        """
        module_name, _, class_name = self.spec.factory.partition(":")
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            raise PluginLoadError(
                f"{self.title} cannot be imported: {describe(error)}. {remedy_for(self.found, error)}"
            ) from error
        made: Any = module
        for part in class_name.split("."):
            if not hasattr(made, part):
                raise PluginLoadError(
                    f"{self.title} names the class {self.spec.factory}, but {module_name} has no {part}."
                    f"{did_you_mean(part, vars(made))} {remedy_for(self.found)}"
                )
            made = getattr(made, part)
        return made

    def build(self, options: Options, context: Context) -> Any:
        """The component's object.

        Raises `PluginLoadError` where the factory fails, `PluginContractError` where its object lacks a
        method of the contract.  A `SlimeError` of the factory passes: it is meant for the user.
        """
        factory = self.factory()
        try:
            made = factory(options, context)
        except SlimeError:
            raise
        except Exception as error:
            raise PluginLoadError(f"{self.title} cannot be built: {describe(error)}") from error
        missing = [name for name in KINDS[self.kind].methods if not callable(getattr(made, name, None))]
        if missing:
            raise PluginContractError(
                f"{self.title}: {self.spec.factory} built a {type(made).__name__} without {', '.join(missing)}(),"
                f" which every {KINDS[self.kind].title} must have (see slime.plugin)"
            )
        return made


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def remedy_for(found: FoundPlugin, error: BaseException | None = None) -> str:
    """What a user can do about a plugin that does not work."""
    if isinstance(error, ModuleNotFoundError) and error.name and not found.entry.startswith(error.name.split(".")[0]):
        package = error.name.split(".")[0]
        # The import's name need not be the package's, and a stranger may own a package of that name.
        return (
            f"Install the package that provides {package}, which {found.distribution} should require: tell its authors."
        )
    if found.own:
        return "slime's own installation is damaged; install it again."
    return f"Try: pip install -U {found.distribution}, or tell its authors."
