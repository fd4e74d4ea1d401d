"""A component that a plugin provides: where it comes from, its options, what it needs, and its object."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import importlib_metadata
from pydantic import Field, ValidationError

from slime.errors import ConfigError, PluginContractError, PluginLoadError, SlimeError, did_you_mean, one_line
from slime.plugin import ComponentSpec, Context, Options
from slime.plugins.find import GROUP, FoundPlugin
from slime.plugins.kinds import KINDS
from slime.plugins.reference import LocalFunction

#: the distribution of a user's own functions, which come in no package
LOCAL_DISTRIBUTION = "local"
#: digits of a file's hash that are its version
_VERSION_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Component:
    """A registered spec and the plugin that registered it."""

    kind: str
    #: of the spec class of its kind
    spec: Any
    found: FoundPlugin
    #: "FILE:LINE" of the hook that registered it, or of the function itself
    origin: str

    @property
    def id(self) -> str:
        """`PLUGIN/NAME`, which always finds it."""
        return f"{self.found.name}/{self.name}"

    @property
    def label(self) -> str:
        """Its name in metrics and loggers."""
        return self.id

    @property
    def name(self) -> str:
        """The bare name, which is enough while no other component of its kind has it."""
        spec: ComponentSpec = self.spec
        return spec.name

    @property
    def title(self) -> str:
        """For messages: `reward math/boxed (slime-reward-math 0.3.1)`."""
        return f"{KINDS[self.kind].title} {self.id} ({self.found.package})"

    def factory(self) -> Any:
        """The class that does the work, imported now.

        Raises:
            PluginLoadError: The module cannot be imported, or lacks the class.
        """
        module_name, _, class_name = self.spec.factory.partition(":")
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            raise PluginLoadError(
                f"{self.title} cannot be imported: {one_line(error)}. {remedy_for(self.found, error)}"
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

        Raises:
            PluginLoadError: The factory failed. (A `SlimeError` of the factory passes: it is meant for the user.)
            PluginContractError: The object lacks a method of the contract.
        """
        factory = self.factory()
        try:
            made = factory(options, context)
        except SlimeError:
            raise
        except Exception as error:
            raise PluginLoadError(f"{self.title} cannot be built: {one_line(error)}") from error
        methods = KINDS[self.kind].methods if self.kind in KINDS else ()
        if missing := [name for name in methods if not callable(getattr(made, name, None))]:
            raise PluginContractError(
                f"{self.title}: {self.spec.factory} built a {type(made).__name__} without {', '.join(missing)}(),"
                f" which every {KINDS[self.kind].title} must have (see slime.plugin)"
            )
        return made


@dataclass(frozen=True, slots=True)
class LocalComponent(Component):
    """A function or class of the user's own as a component: plain data, which the driver sends to other processes.

    Its distribution is `local`, its version the hash of its file, and its factory an adapter that is called with the
    function before options and context. Functions over a finished batch are components of kinds that packages cannot
    provide.
    """

    function: LocalFunction
    #: of its kind, as people call it
    kind_title: str

    @property
    def id(self) -> str:
        """The reference that always finds it."""
        return str(self.function.reference)

    @property
    def label(self) -> str:
        """`custom_rm.reward_func`: without a path, every part of which would become a folder of metrics."""
        return self.name

    @property
    def title(self) -> str:
        """For messages: `reward custom_rm.py:reward_func (local 0123456789ab)`."""
        return f"{self.kind_title} {self.function.title} ({self.found.package})"

    def factory(self) -> Callable[[Options, Context], Any]:
        """The adapter, bound to the function, whose file is run now.

        Raises:
            PluginLoadError: The file cannot be loaded.
        """
        # Explicit, since `super()` finds no class in dataclasses with slots.
        adapter = Component.factory(self)
        try:
            self.function.load()
        except PluginLoadError as error:
            raise PluginLoadError(f"{self.title}: {error}") from error
        return functools.partial(adapter, self.function)


def found_locally(function: LocalFunction) -> FoundPlugin:
    """A user's own file in place of a plugin."""
    return FoundPlugin(
        name=LOCAL_DISTRIBUTION,
        entry=str(function.path),
        distribution=LOCAL_DISTRIBUTION,
        version=function.sha256[:_VERSION_DIGITS],
        entry_point=importlib_metadata.EntryPoint(LOCAL_DISTRIBUTION, str(function.path), GROUP),
        file_sha256=function.sha256,
    )


def remedy_for(found: FoundPlugin, error: BaseException | None = None) -> str:
    """What a user can do about a plugin that does not work."""
    if isinstance(error, ModuleNotFoundError) and error.name and not found.entry.startswith(error.name.split(".")[0]):
        package = error.name.split(".")[0]
        # The package may have another name than the module, and a package of this name may be a stranger's.
        return (
            f"Install the package that provides {package}, which {found.distribution} should require: tell its authors."
        )
    if found.own:
        return "slime's own installation is damaged; install it again."
    return f"Try: pip install -U {found.distribution}, or tell its authors."


#: kinds whose components are called once per sample while a rollout waits
LIMITED_KINDS = frozenset(kind.name for kind in KINDS.values() if kind.limited)


class Limits(Options):
    """Options that the kernel gives every component of a limited kind, such as `--reward.timeout-s 5`."""

    timeout_s: float | None = Field(default=None, gt=0, description="seconds a call may take; default: the component's")
    error_budget: float = Field(
        default=0.25, ge=0, le=1, description="share of a rollout's samples, or of 20 if it has fewer, that it may fail"
    )


def checked_options(component: Component, options: Mapping[str, Any]) -> tuple[Options, Limits]:
    """The component's options model, and its limits.

    Raises:
        ConfigError: Options are unknown, missing or invalid; the message names each of them.
    """
    names = Limits.model_fields if component.kind in LIMITED_KINDS else {}
    limits = {name: value for name, value in options.items() if name in names}
    own = {name: value for name, value in options.items() if name not in names}
    problems: list[str] = []
    checked_limits = _checked(Limits, limits, component, problems)
    checked_own = _checked(component.spec.options, own, component, problems)
    if checked_limits is None or checked_own is None:
        raise ConfigError(f"options of {component.title}: {'; '.join(problems)}")
    assert isinstance(checked_limits, Limits)
    return checked_own, checked_limits


def _checked(
    model: type[Options], options: Mapping[str, Any], component: Component, problems: list[str]
) -> Options | None:
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        problems += [_problem(dict(entry), component) for entry in error.errors(include_url=False)]
    return None


def _problem(entry: dict[str, Any], component: Component) -> str:
    name = ".".join(map(str, entry["loc"])) or "all"
    if entry["type"] == "extra_forbidden":
        known = [
            *component.spec.options.model_fields,
            *(Limits.model_fields if component.kind in LIMITED_KINDS else ()),
        ]
        return f"no option {name!r}.{did_you_mean(name, known)} Options: {', '.join(known) or 'none'}"
    if entry["type"] == "missing":
        return f"{name!r} is required"
    return f"{name!r} is {entry['input']!r}: {entry['msg']}"


def check_requires(component: Component) -> None:
    """Raise `PluginLoadError`, with the command to run, unless everything in `spec.requires` is installed."""
    unmet = unmet_requirements(component)
    if unmet:
        needs = " and ".join(f"{requirement} ({state})" for requirement, state in unmet)
        install = " ".join(f'"{requirement}"' for requirement, _ in unmet)
        raise PluginLoadError(f"{component.title} needs {needs}. Try: pip install {install}")


def unmet_requirements(component: Component) -> list[tuple[str, str]]:
    """Unmet requirements, each with what is installed instead. Requirements of other platforms are skipped."""
    return [(text, state) for text in component.spec.requires for state in [_state(text)] if state is not None]


def malformed(requirements: Sequence[object]) -> str | None:
    """The first entry that is not a PEP 508 requirement, and why; None if all are."""
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
