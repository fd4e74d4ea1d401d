"""Is the class that a spec names there, and can its module import?  Answered from the source, importing nothing.

The class may import torch and is wanted in another process, but a run must be refused before it starts one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from slime.errors import PluginLoadError, did_you_mean
from slime.plugins.component import Component, remedy_for


def check_factory(component: Component) -> None:
    """Raise `PluginLoadError` where the factory cannot work: a syntax error, a missing import or class.

    Says nothing about what only running the module would tell.
    """
    module, _, name = component.spec.factory.partition(":")
    found = find_spec(module)
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return
    try:
        tree = ast.parse(Path(found.origin).read_bytes(), Path(found.origin).name)
    except (SyntaxError, ValueError) as error:
        raise PluginLoadError(
            f"{component.title}: {found.origin} is no Python: {error}. {remedy_for(component.found)}"
        ) from None
    for package in _packages_needed(tree):
        if find_spec(package) is None:
            missing = ModuleNotFoundError(f"No module named {package!r}", name=package)
            raise PluginLoadError(
                f"{component.title} cannot be imported: {module} needs {package}, which is not installed."
                f" {remedy_for(component.found, missing)}"
            )
    names = set(_names_bound(tree.body))
    first = name.split(".")[0]
    if first not in names and not names & {"*", "__getattr__"}:
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


def _names_bound(body: list[ast.stmt]) -> Iterator[str]:
    """Names that the module's own statements bind, on every branch."""
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.split(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
        else:
            for field in ("body", "orelse", "finalbody"):
                yield from _names_bound(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from _names_bound(handler.body)
