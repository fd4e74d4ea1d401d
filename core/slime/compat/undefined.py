"""Names that a user's function uses and nothing defines: told before a run, which would end at its first sample."""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

#: where the descriptors of a class keep their functions
_INSIDE = ("__func__", "fget", "fset", "func")


def undefined_names(module: ModuleType, value: Any) -> dict[str, int]:
    """The names, with their lines, that a function or class of a module would look for in vain.

    The functions and classes of the module that it uses are followed. What is imported from elsewhere is left to the
    run, and so is code that expects a `NameError`.
    """
    known, missing = vars(module), dict[str, int]()
    waiting, seen = [value], {id(value)}
    while waiting:
        for code in _codes(module, waiting.pop()):
            loads = {} if "NameError" in code.co_names else _global_names(code, "LOAD_GLOBAL", "LOAD_NAME")
            used = [known[name] for name in loads if name in known]
            waiting += [one for one in used if id(one) not in seen]
            seen |= set(map(id, used))
            unknown = {name: line for name, line in loads.items() if name not in known and not hasattr(builtins, name)}
            of_class_bodies = _global_names(code, "STORE_NAME")
            missing = {name: line for name, line in unknown.items() if name not in of_class_bodies} | missing
    if missing:
        every = (code for one in list(known.values()) for code in _codes(module, one))
        assigned = {name for code in every for name in _global_names(code, "STORE_GLOBAL")}
        missing = {name: line for name, line in missing.items() if name not in assigned}
    return missing


def _codes(module: ModuleType, value: Any) -> Iterator[CodeType]:
    """The code of a function, or of a class's methods, with the code inside it, if the module has written it."""
    inner = inspect.unwrap(value) if inspect.isroutine(value) else value
    if inspect.isclass(inner) and inner.__module__ == module.__name__:
        for member in vars(inner).values():
            for one in (member, *(getattr(member, key, None) for key in _INSIDE)):
                if inspect.isroutine(one):
                    yield from _codes(module, one)
    elif inspect.isfunction(inner) and inner.__globals__ is vars(module):
        yield from _nested(inner.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _global_names(code: CodeType, *operations: str) -> dict[str, int]:
    """The names on which the code does one of these operations, each with its first line."""
    names: dict[str, int] = {}
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        line = step.starts_line or line
        if step.opname in operations:
            names.setdefault(step.argval, line)
    return names
