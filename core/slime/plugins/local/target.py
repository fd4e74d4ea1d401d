"""Which function or class a reference means, told from source text before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slime.errors import PluginConflictError, PluginLoadError, PluginNotFoundError, did_you_mean
from slime.plugins.local.definitions import Class, Definition, Function, definition, own_definitions
from slime.plugins.local.imports import check_imports
from slime.plugins.local.reference import Reference
from slime.plugins.local.shapes import Role, Shape
from slime.plugins.local.source import Source, module_source


@dataclass(frozen=True, slots=True)
class Target:
    """A function or class with the shape in which it will be called."""

    role: Role
    #: with the name in it, where the user left it to be guessed
    reference: Reference
    #: the file that is loaded; the definition may be in one that it imports
    source: Source
    name: str
    definition: Function | Class
    shape: Shape

    @property
    def origin(self) -> str:
        """FILE:LINE of the definition."""
        return f"{self.definition.source.path}:{self.definition.line}"

    @property
    def is_async(self) -> bool:
        """Whether what is called is an `async def`."""
        if isinstance(self.definition, Function):
            return self.definition.is_async
        method = self.definition.methods.get(self.shape.method)
        return method is not None and method.is_async


def find_target(role: Role, reference: Reference) -> Target:
    """What `reference` means where `role` is wanted.

    Raises `PluginNotFoundError` for a missing file or name, `PluginLoadError` for one that cannot work (a syntax
    error, a missing import, parameters of no shape), `PluginConflictError` where several could be meant.
    """
    source, name = _source_and_name(reference)
    name, found = _chosen(role, source) if name is None else (name, _named(source, name))
    shape = role.shape_of(found)
    if shape is None or not isinstance(found, Function | Class):
        raise PluginLoadError(
            f"{found.source.path}:{found.line}: got {found}, which does not fit a {role.title}: {role.why_not(found)}."
            f" Expected, parameters by name, {role.expected}"
        )
    check_imports(source)
    if reference.file is not None:
        reference = Reference(reference.file, "", name)
    else:
        reference = Reference(None, f"{source.module}.{name}", None)
    return Target(role, reference, source, name, found, shape)


def _source_and_name(reference: Reference) -> tuple[Source, str | None]:
    if reference.file is not None:
        return Source.read(reference.file, by_path=True), reference.name
    whole = module_source(reference.dotted)
    if whole is not None:
        return whole, None
    module, _, name = reference.dotted.rpartition(".")
    source = module_source(module)
    if source is None:
        as_file = Path(*module.split(".")).with_suffix(".py")
        hint = f" Did you mean {as_file}:{name}?" if as_file.is_file() else " (a file is named as FILE.py:NAME)"
        raise PluginNotFoundError(f"there is no module {module} with Python source on the path.{hint}")
    return source, name


def _named(source: Source, name: str) -> Definition:
    found = definition(source, name)
    if found is None:
        names = [own.name for own in own_definitions(source)]
        has = f"It defines {', '.join(names)}." if names else "It defines nothing public."
        raise PluginNotFoundError(f"{source.path} has no {name}.{did_you_mean(name, names)} {has}")
    return found


def _chosen(role: Role, source: Source) -> tuple[str, Definition]:
    """What is meant where no name is stated: what has a usual name, else the only definition that fits."""
    for names in role.usual:
        usual = {name: found for name in names if (found := definition(source, name)) is not None}
        if usual:
            return _only(usual, source)
    own = list(own_definitions(source))
    fitting = [found for found in own if role.shape_of(found) is not None]
    # A class that another one refines is not meant itself.
    refined = {name for found in fitting if isinstance(found, Class) for name in found.ancestors}
    fitting = [found for found in fitting if found.name not in refined]
    if fitting:
        return _only({found.name: found for found in fitting}, source)
    has = "; ".join(f"line {found.line}: {found} ({role.why_not(found)})" for found in own) or "nothing public"
    usual_names = [name for names in role.usual for name in names]
    called = f", best called {usual_names[0]}" if usual_names else ""
    raise PluginNotFoundError(
        f"{source.path} has nothing that fits a {role.title}. Got {has}. Expected{called}, parameters by name,"
        f" {role.expected}"
    )


def _only(candidates: Mapping[str, Definition], source: Source) -> tuple[str, Definition]:
    if len(candidates) > 1:
        choices = " or ".join(f"{source.path.name}:{name} (line {found.line})" for name, found in candidates.items())
        raise PluginConflictError(f"{source.path} has several that could be meant: write {choices}")
    [only] = candidates.items()
    return only
