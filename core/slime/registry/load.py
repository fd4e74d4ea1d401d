"""Loads plugins one by one, so that a broken plugin does not affect the others, and checks what they register.

Modules, specs and the source of components are checked. Nothing heavy is imported.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import symtable
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import decode_source, find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pluggy
from pydantic import SecretStr

from slime.errors import PluginLoadError, did_you_mean, one_line
from slime.errors.raised import Raised
from slime.errors.redaction import is_secret
from slime.plugin import API_VERSION, EstimatorSpec, GeneratorSpec, Options, RewardSpec
from slime.registry.component import CallLimits, Component, remedy_for
from slime.registry.find import FoundPlugin, check_requirement
from slime.registry.kinds import KINDS, Kind

#: plugin API numbers that this slime accepts: the current one and, once there is one, the one before
ACCEPTED_APIS = tuple(number for number in (API_VERSION - 1, API_VERSION) if number >= 1)

#: types of a spec's fields, in words
_WORDS = {str: "text", bool: "True or False"}
_FIELD_TYPES = {kind.name: get_type_hints(kind.spec) for kind in KINDS.values()}
_PLUGIN_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_COMPONENT_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class Defect(Exception):
    """What is wrong with a plugin, and what to do about it, if that is known."""

    def __init__(self, problem: str, remedy: str | None = None) -> None:
        super().__init__(problem)
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """A plugin with a valid module and valid specs; none of its components has been built."""

    found: FoundPlugin
    module: ModuleType = field(compare=False, repr=False)
    api: int
    components: tuple[Component, ...]


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A broken plugin."""

    found: FoundPlugin
    #: what is wrong, in one line
    problem: str
    remedy: str
    #: its `slime_api`, if that was read and is a whole number
    api: int | None = None
    exception: BaseException | None = field(default=None, compare=False, repr=False)

    @property
    def advice(self) -> str:
        """Problem and remedy, as sentences."""
        return f"{self.problem}{'' if self.problem.endswith('?') else '.'} {self.remedy}"

    def __str__(self) -> str:
        return f"plugin {self.found.name} ({self.found.package}) is broken: {self.advice}"


def load_each(
    plugins: Sequence[FoundPlugin], manager: pluggy.PluginManager
) -> tuple[list[LoadedPlugin], list[PluginFailure]]:
    """Import, validate and register every plugin. What a plugin raises becomes its failure."""
    by_name: dict[str, list[FoundPlugin]] = defaultdict(list)
    for found in plugins:
        by_name[found.name].append(found)
    loaded: list[LoadedPlugin] = []
    failures: list[PluginFailure] = []
    for found in plugins:
        rivals = [other for other in by_name[found.name] if other is not found]
        if rivals and not found.own:
            failures.append(_same_id(found, rivals))
            continue
        result = _load(found, manager)
        if isinstance(result, LoadedPlugin):
            loaded.append(result)
        else:
            failures.append(result)
    return loaded, failures


def _load(found: FoundPlugin, manager: pluggy.PluginManager) -> LoadedPlugin | PluginFailure:
    """Load one plugin; what it raises becomes a failure."""
    api: int | None = None
    try:
        check_plugin_name(found)
        module = found.entry_point.load()
        if not isinstance(module, ModuleType):
            raise Defect(f"its entry point {found.entry} names a {type(module).__name__}, expected a module")
        stated = getattr(module, "slime_api", None)
        api = stated if type(stated) is int else None
        checked_api = check_api(stated, found)
        check_hooks(module, manager)
        manager.register(module, found.name)
        try:
            components = collect_components(found, manager)
        except BaseException:
            manager.unregister(name=found.name)
            raise
    except Defect as defect:
        return PluginFailure(found, str(defect), defect.remedy or remedy_for(found), api, defect)
    except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - the boundary around a plugin's import
        return PluginFailure(found, _cause(error, found), remedy_for(found, error), api, error)
    return LoadedPlugin(found, module, checked_api, components)


def _cause(error: BaseException, found: FoundPlugin) -> str:
    if isinstance(error, SystemExit):
        return f"it ends the process when it is loaded ({Raised.of(error)})"
    module = found.entry.partition(":")[0].strip()
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return f"its entry point names the module {module}, which is not there ({one_line(error)})"
    return str(Raised.of(error))


def _same_id(found: FoundPlugin, rivals: Sequence[FoundPlugin]) -> PluginFailure:
    others = " and ".join(sorted(rival.distribution for rival in rivals))
    return PluginFailure(
        found,
        f"its id {found.name} is also the id of a plugin of {others}",
        f'Uninstall one of them, or write [plugins] deny = ["{found.distribution}"].',
    )


def hook_of(manager: pluggy.PluginManager, hook: str, plugin: str) -> pluggy.HookCaller:
    """A caller that calls a hook of one plugin only."""
    return manager.subset_hook_caller(hook, [module for name, module in manager.list_name_plugin() if name != plugin])


# --- what is checked ------------------------------------------------------------------------------------


def check_plugin_name(found: FoundPlugin) -> None:
    """Check a plugin's id, which is the first half of its components' ids."""
    if not _PLUGIN_NAME.fullmatch(found.name):
        raise Defect(f"its id {found.name!r} is not made of lower-case letters, digits, _ and -")


def check_api(stated: object, found: FoundPlugin) -> int:
    """The plugin API that a plugin was written for, which this slime must support."""
    if type(stated) is not int:
        raise Defect(
            f"{found.entry} has slime_api = {stated!r}, expected a whole number: the plugin API it was written for"
            f" (`slime_api = {API_VERSION}`)"
        )
    if stated not in ACCEPTED_APIS:
        raise Defect(
            f"written for plugin API {stated}, this slime supports {' and '.join(map(str, ACCEPTED_APIS))}",
            f"Try: a newer slime, or an older {found.distribution}"
            if stated > API_VERSION
            else f"Try: pip install -U {found.distribution}",
        )
    return stated


def check_hooks(module: ModuleType, manager: pluggy.PluginManager) -> None:
    """Check that every function that looks like a hook is one, and has only parameters that the hook passes.

    pluggy accepts unknown names silently, so a misspelt hook would never be called.
    """
    known = {name: caller for name, caller in vars(manager.hook).items() if name.startswith("slime_")}
    for name, member in vars(module).items():
        if not inspect.isroutine(member):
            continue
        marked = getattr(member, "slime_impl", None)
        hook = (marked or {}).get("specname") or name
        if not marked and not name.startswith("slime_"):
            continue
        if hook not in known:
            raise Defect(f"{name}() is not a hook of slime.{did_you_mean(hook, known)}")
        if not marked:
            raise Defect(f"{name}() is not marked with @slime.plugin.hookimpl, so it would never be called")
        if marked.get("wrapper") or marked.get("hookwrapper"):
            raise Defect(f"{name}() is a hook wrapper, expected a plain function")
        if inspect.iscoroutinefunction(member) or inspect.isgeneratorfunction(member):
            raise Defect(f"{name}() is a coroutine or generator function, which would never run; expected a plain one")
        _check_parameters(name, member, known[hook].spec.argnames)


def _check_parameters(name: str, function: Any, passed: tuple[str, ...]) -> None:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.default is not parameter.empty:
            raise Defect(f"{name}() has the parameter `{parameter}`, expected plain parameters without defaults")
        if parameter.name not in passed:
            passes = f"only {', '.join(passed)}" if passed else "no arguments"
            raise Defect(
                f"{name}() has the parameter `{parameter.name}`, but this hook passes {passes}."
                f"{did_you_mean(parameter.name, passed)}"
            )


def collect_components(found: FoundPlugin, manager: pluggy.PluginManager) -> tuple[Component, ...]:
    """Call the plugin's registration hooks and check every spec."""
    components: list[Component] = []
    for kind in KINDS.values():
        hook = hook_of(manager, kind.hook, found.name)
        try:
            answers = hook()
        except Exception as error:
            raise Defect(f"{kind.hook}() raised {one_line(error)}") from error
        implementations = hook.get_hookimpls()
        # pluggy leaves out the answer of a plugin that returned None.
        for specs in answers if len(answers) == len(implementations) else [None]:
            if not isinstance(specs, list | tuple):
                raise Defect(
                    f"{kind.hook}() returned a {type(specs).__name__}, expected a list of {kind.spec.__name__}"
                )
            code = implementations[0].function.__code__
            for spec in specs:
                check_spec(spec, kind)
                if any(other.kind == kind.name and other.name == spec.name for other in components):
                    raise Defect(f"{kind.hook}() registers {spec.name!r} twice")
                components.append(Component(kind.name, spec, found, f"{code.co_filename}:{code.co_firstlineno}"))
    return tuple(components)


def check_spec(spec: object, kind: Kind) -> None:
    """Check that a spec is of its kind and that its fields have valid values."""
    if not isinstance(spec, kind.spec):
        raise Defect(f"{kind.hook}() returned a {type(spec).__name__} in its list, expected {kind.spec.__name__}")
    if not isinstance(spec.name, str) or not _COMPONENT_NAME.fullmatch(spec.name):
        raise Defect(f"{kind.title} name {spec.name!r} is not made of lower-case letters, digits, _ and -")
    title = f"{kind.title} {spec.name}"
    if not isinstance(spec.factory, str) or not _FACTORY.fullmatch(spec.factory):
        raise Defect(f'{title} has factory {spec.factory!r}, expected "package.module:Class"')
    if not _module_exists(spec.factory.partition(":")[0]):
        raise Defect(f"{title} has factory {spec.factory!r}, but there is no module {spec.factory.partition(':')[0]}")
    if not (isinstance(spec.options, type) and issubclass(spec.options, Options)):
        raise Defect(f"{title} has options {spec.options!r}, expected a subclass of slime.plugin.Options")
    limits = CallLimits.model_fields if kind.limited else {}
    reserved = sorted(set(limits) & set(spec.options.model_fields))
    if reserved:
        raise Defect(
            f"{title} has the option {reserved[0]}, a name that slime uses for an option of every {kind.title}",
            f"Rename it; --{kind.name}.{reserved[0].replace('_', '-')} is an option of slime itself.",
        )
    for name, option in spec.options.model_fields.items():
        if _holds_secret(option.annotation) and not is_secret(name):
            raise Defect(
                f"{title} has the secret option {name}, whose name does not say so",
                f"Name it e.g. {name}_password: slime keeps what is named so out of files and messages.",
            )
    expected: dict[str, tuple[bool, str]] = {
        "requires": (isinstance(spec.requires, list | tuple), "a tuple of PEP 508 requirements")
    }
    for name, hint in _FIELD_TYPES[kind.name].items():
        if get_origin(hint) is Literal:
            expected[name] = getattr(spec, name) in get_args(hint), " or ".join(map(repr, get_args(hint)))
        elif hint in _WORDS:
            expected[name] = isinstance(getattr(spec, name), hint), _WORDS[hint]
    if isinstance(spec, EstimatorSpec):
        bounds = spec.clip_range
        pair = isinstance(bounds, tuple) and len(bounds) == 2 and all(_is_number(bound) for bound in bounds)
        expected["clip_range"] = pair, "two numbers of at least 0"
        known = {"group", "critic", "reference"}
        unknown = sorted(map(str, {spec.needs} if isinstance(spec.needs, str) else set(spec.needs) - known))
        if unknown:
            raise Defect(f"{title} needs {', '.join(unknown)}, expected a set of {', '.join(sorted(known))}")
    if isinstance(spec, RewardSpec | GeneratorSpec):
        run_default = isinstance(spec, GeneratorSpec) and spec.timeout_s is None
        positive = run_default or (_is_number(spec.timeout_s) and spec.timeout_s != 0)
        expected["timeout_s"] = positive, "a positive number of seconds"
    for name, (fits, what) in expected.items():
        if not fits:
            raise Defect(f"{title} has {name} {getattr(spec, name)!r}, expected {what}")
    for text in spec.requires:
        try:
            check_requirement(text)
        except ValueError as error:
            raise Defect(f'{title} requires {error}; expected e.g. "sympy>=1.12"') from None


def _holds_secret(annotation: Any) -> bool:
    """Whether a type is pydantic's `SecretStr`, alone or as a part."""
    return annotation is SecretStr or any(_holds_secret(part) for part in get_args(annotation))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def _module_exists(name: str) -> bool:
    """Whether the module can be found. Its packages are imported on the way, which are light by contract."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def check_factory(component: Component) -> None:
    """Raise `PluginLoadError` if the source shows a syntax error, a missing import or a missing class.

    The module is not run, so other errors are not found.
    """
    module, _, name = component.spec.factory.partition(":")
    found = find_spec(module)
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return
    try:
        source = decode_source(Path(found.origin).read_bytes())
        tree = ast.parse(source, Path(found.origin).name)
    except (SyntaxError, ValueError) as error:
        raise PluginLoadError(
            f"{component.title}: {found.origin} is not valid Python: {error}. {remedy_for(component.found)}"
        ) from None
    for package in _packages_needed(tree):
        if find_spec(package) is None:
            missing = ModuleNotFoundError(f"No module named {package!r}", name=package)
            raise PluginLoadError(
                f"{component.title} cannot be imported: {module} needs {package}, which is not installed."
                f" {remedy_for(component.found, missing)}"
            )
    symbols = symtable.symtable(source, found.origin, "exec").get_symbols()
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    star = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree))
    first = name.split(".")[0]
    if first not in names and not star and "__getattr__" not in names:
        raise PluginLoadError(
            f"{component.title} names the class {component.spec.factory}, but {module} has no {first}."
            f"{did_you_mean(first, names)} {remedy_for(component.found)}"
        )


def _packages_needed(tree: ast.Module) -> Iterator[str]:
    """Top-level packages that the module imports without condition."""
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            yield from (alias.name.split(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module.split(".")[0]
