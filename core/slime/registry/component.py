"""A component that a plugin provides: where it comes from, its options, what it needs, and its object."""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import importlib_metadata
from pydantic import Field, ValidationError

from slime.errors import ConfigError, PluginContractError, PluginLoadError, SlimeError, did_you_mean
from slime.errors.raised import Raised, report
from slime.errors.redaction import redacted
from slime.plugin import ComponentSpec, Context, Options
from slime.registry.find import GROUP, FoundPlugin
from slime.registry.function_path import LocalFunction
from slime.registry.kinds import KINDS

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
    #: "FILE:LINE" of the hook that registered it, or of the function given by path
    origin: str

    @property
    def id(self) -> str:
        """`PLUGIN/NAME`, which always selects it."""
        return f"{self.found.name}/{self.name}"

    @property
    def label(self) -> str:
        """Its name in metrics and loggers."""
        return self.id

    @property
    def name(self) -> str:
        """The bare name, which selects it unless another component of its kind has the same name."""
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
        except BaseException as error:
            Raised.of(error).log(self.title)
            raise PluginLoadError(
                f"{self.title} cannot be imported: {Raised.of(error)}. {remedy_for(self.found, error)}"
            ) from error
        try:
            return operator.attrgetter(class_name)(module)
        except AttributeError as error:
            raise PluginLoadError(
                f"{self.title} names the class {self.spec.factory}, but {module_name} has no {error.name}."
                f"{did_you_mean(str(error.name), dir(error.obj))} {remedy_for(self.found)}"
            ) from None

    def build(self, options: Options, context: Context) -> Any:
        """The component's object.

        Raises:
            PluginLoadError: The factory failed. (A `SlimeError` is passed on unchanged: it is meant for the user.)
            PluginContractError: The object lacks a method of the contract.
        """
        factory = self.factory()
        try:
            made = factory(options, context)
        except SlimeError:
            raise
        except BaseException as error:
            raise PluginLoadError(report(f"{self.title} cannot be built", error)) from error
        methods = KINDS[self.kind].methods if self.kind in KINDS else ()
        if missing := [name for name in methods if not callable(getattr(made, name, None))]:
            raise PluginContractError(
                f"{self.title}: {self.spec.factory} built a {type(made).__name__} without {', '.join(missing)}(),"
                f" which every {KINDS[self.kind].title} must have (see slime.plugin)"
            )
        return made


@dataclass(frozen=True, slots=True)
class LocalComponent(Component):
    """A function or class given by path, as a component: plain data, which the driver sends to other processes.

    Its distribution is `local`, and its version is the hash of its file. Its factory is an adapter that is called with
    the function, the options and the context. Functions over a finished batch have kinds that packages cannot provide.
    """

    function: LocalFunction
    #: its kind, for messages
    kind_title: str

    @property
    def id(self) -> str:
        """The reference that selects it."""
        return str(self.function.reference)

    @property
    def label(self) -> str:
        """`custom_rm.reward_func`: without the path, whose parts would become levels in the metrics' names."""
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
        # Explicit, since `super()` without arguments does not work in dataclasses with slots.
        adapter = Component.factory(self)
        try:
            self.function.load()
        except PluginLoadError as error:
            raise PluginLoadError(f"{self.title}: {error}") from error
        return functools.partial(adapter, self.function)


def found_locally(function: LocalFunction) -> FoundPlugin:
    """A user's own file, in the form of a plugin."""
    return FoundPlugin(
        name=LOCAL_DISTRIBUTION,
        entry=str(function.path),
        distribution=LOCAL_DISTRIBUTION,
        version=function.sha256[:_VERSION_DIGITS],
        entry_point=importlib_metadata.EntryPoint(LOCAL_DISTRIBUTION, str(function.path), GROUP),
        file_sha256=function.sha256,
    )


def remedy_for(found: FoundPlugin, error: BaseException | None = None) -> str:
    """What a user can do about a plugin that does not work: repair it, if it is the user's own."""
    if isinstance(error, ModuleNotFoundError) and error.name and not found.entry.startswith(error.name.split(".")[0]):
        package = error.name.split(".")[0]
        if found.own and package.startswith("slime_"):
            return f"{package} comes with {found.distribution}: install that again, with all of its packages."
        # The package may not be called like the module: a command with its name could install a stranger's package.
        return f"Install the package that provides {package}; {found.distribution} should require it: tell its authors."
    if found.own:
        return "slime's own installation is damaged; install it again."
    where = "" if error is None else Raised.of(error).where
    if found.distribution == LOCAL_DISTRIBUTION:
        return f"Repair {where or found.entry}."
    if (folder := found.editable_folder) is not None:
        return f"Repair {where or f'it in {folder}'}."
    return f"Try: pip install -U {found.distribution}, or tell its authors{found.contact}."


#: kinds whose components are called once per sample while a rollout waits
LIMITED_KINDS = frozenset(kind.name for kind in KINDS.values() if kind.limited)


class CallLimits(Options):
    """Options that the kernel gives every component of a limited kind, such as `--reward.timeout-s 5`."""

    timeout_s: float | None = Field(default=None, gt=0, description="seconds a call may take; default: the component's")
    error_budget: float = Field(
        default=0.25, ge=0, le=1, description="share of a rollout's samples, or of 20 if it has fewer, that it may fail"
    )


def checked_options(component: Component, options: Mapping[str, Any]) -> tuple[Options, CallLimits]:
    """The component's options and its limits, validated.

    Raises:
        ConfigError: Options are unknown, missing or invalid; the message names each of them.
    """
    limits = CallLimits.model_fields if component.kind in LIMITED_KINDS else {}
    made: list[Options] = []
    problems: list[str] = []
    for model in (component.spec.options, CallLimits):
        stated = {name: value for name, value in options.items() if (name in limits) == (model is CallLimits)}
        try:
            made.append(model.model_validate(stated))
        except ValidationError as error:
            known = [*component.spec.options.model_fields, *limits]
            slots = KINDS[component.kind].slots
            name = f"{component.name}." if slots[0].repeated else ""
            flags = f"--{slots[0].prefixes[0]}.{name}" if len(slots) == 1 else ""
            problems += [_problem(dict(entry), known, flags) for entry in error.errors(include_url=False)]
    if problems:
        raise ConfigError(f"options of {component.title}: {'; '.join(problems)}")
    own, limited = made
    assert isinstance(limited, CallLimits)
    return own, limited


def _problem(entry: dict[str, Any], known: list[str], flags: str) -> str:
    name = ".".join(map(str, entry["loc"])) or "all"
    if entry["type"] == "extra_forbidden":
        return f"no option {name!r}.{did_you_mean(name, known)} Options: {', '.join(known) or 'none'}"
    if entry["type"] == "missing":
        return f"{name!r} is required" + (f": write {flags}{name.replace('_', '-')}" if flags else "")
    return f"{name!r} is {redacted(entry['input'], name)!r}: {entry['msg']}"
