"""What a source file defines under a name: a function or a class, wherever an import leads to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from slime.plugins.local.parameters import Parameters
from slime.plugins.local.source import Source

#: imports, aliases and base classes that are followed
_FAR = 10


@dataclass(frozen=True, slots=True)
class Function:
    """A `def` or `async def`."""

    name: str
    source: Source
    line: int
    is_async: bool
    parameters: Parameters

    def __str__(self) -> str:
        return f"{self.name}{self.parameters.text}"


@dataclass(frozen=True, slots=True)
class Class:
    """A `class` with the methods it has of its own or inherits."""

    name: str
    source: Source
    line: int
    methods: dict[str, Function]
    #: names of all classes it inherits from
    ancestors: frozenset[str]
    #: whether all its base classes were found, so that a method which is not in `methods` does not exist
    complete: bool

    def __str__(self) -> str:
        constructor = self.methods.get("__init__")
        return f"class {self.name}{constructor.parameters.text if constructor is not None else ''}"


@dataclass(frozen=True, slots=True)
class Opaque:
    """A name that is bound to something whose parameters only running the file would tell."""

    name: str
    source: Source
    line: int

    def __str__(self) -> str:
        return f"{self.name} = ..."


Definition = Function | Class | Opaque


def definition(source: Source, name: str, far: int = _FAR) -> Definition | None:
    """What `name` is at the top level of a file; None where it binds no such name."""
    found: Definition | None = None
    for statement in source.statements():
        bound = _bound(source, statement, name, far)
        if bound is not None:
            found = bound
    return found


def own_definitions(source: Source) -> Iterator[Function | Class]:
    """The functions and classes written in the file itself, without those named `_...`."""
    for name in dict.fromkeys(_names_defined(source)):
        found = definition(source, name)
        if not name.startswith("_") and isinstance(found, Function | Class):
            yield found


def _names_defined(source: Source) -> Iterator[str]:
    for statement in source.statements():
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name


def _bound(source: Source, statement: ast.stmt, name: str, far: int) -> Definition | None:
    """What one statement binds `name` to, where it does."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() if statement.name == name:
            return _function(source, statement)
        case ast.ClassDef() if statement.name == name:
            return _class(source, statement, far)
        case ast.ImportFrom(module=module, names=names, level=level):
            for alias in names:
                if name == (alias.asname or alias.name):
                    there = source.imported(module or "", level) if far else None
                    found = definition(there, alias.name, far - 1) if there is not None else None
                    return found or Opaque(name, source, statement.lineno)
        case ast.Assign(targets=[ast.Name(id=target)], value=ast.Name(id=other)) if target == name and far:
            return definition(source, other, far - 1) or Opaque(name, source, statement.lineno)
        case ast.Assign() | ast.AnnAssign():
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(node, ast.Name) and node.id == name for t in targets for node in ast.walk(t)):
                return Opaque(name, source, statement.lineno)
    return None


def _function(source: Source, node: ast.FunctionDef | ast.AsyncFunctionDef, *, method: bool = False) -> Function:
    static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)
    parameters = Parameters.written(node.args, method=method and not static)
    return Function(node.name, source, node.lineno, isinstance(node, ast.AsyncFunctionDef), parameters)


def _class(source: Source, node: ast.ClassDef, far: int) -> Class:
    methods: dict[str, Function] = {}
    ancestors: set[str] = set()
    complete = True
    for base in reversed(node.bases):
        parent = _base(source, base, far)
        if parent is not None:
            methods |= parent.methods
            ancestors |= {parent.name} | parent.ancestors
        complete = complete and (parent.complete if parent is not None else ast.unparse(base) in ("object", "Protocol"))
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            methods[statement.name] = _function(source, statement, method=True)
    return Class(node.name, source, node.lineno, methods, frozenset(ancestors), complete)


def _base(source: Source, base: ast.expr, far: int) -> Class | None:
    """A base class by its name, or by the `module.Name` of a module that is imported as a whole."""
    if far and isinstance(base, ast.Name):
        found = definition(source, base.id, far - 1)
    elif far and isinstance(base, ast.Attribute):
        there = source.imported(ast.unparse(base.value), 0)
        found = definition(there, base.attr, far - 1) if there is not None else None
    else:
        found = None
    return found if isinstance(found, Class) else None
