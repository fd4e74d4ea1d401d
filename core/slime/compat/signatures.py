"""The parameters of a user's functions and classes, and calls that pass only the arguments they have parameters for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from slime.compat.undefined import undefined_names

if TYPE_CHECKING:
    from slime.compat.args_view import ArgsView
    from slime.plugin import Context
    from slime.registry.function_path import LocalFunction

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Signature:
    """The named parameters of a function; `*args` and `**kwargs` are ignored."""

    names: tuple[str, ...]
    #: names without a default
    required: tuple[str, ...]
    #: as written: "(args, sample: Sample, **kwargs)"
    text: str
    is_async: bool
    #: module in which the function is defined
    module: str

    @classmethod
    def of(cls, function: Callable[..., Any], *, bound: bool = True) -> Signature | None:
        """The signature of a callable; None if Python cannot determine it.

        Args:
            function: A function, class or method.
            bound: False for a method that was looked up on its class: its first parameter is ignored.
        """
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return None
        named = [one for one in signature.parameters.values() if one.kind not in _VARIADIC][0 if bound else 1 :]
        return cls(
            tuple(one.name for one in named),
            tuple(one.name for one in named if one.default is one.empty),
            str(signature),
            inspect.iscoroutinefunction(function),
            str(getattr(function, "__module__", "")),
        )


@dataclass(frozen=True, slots=True)
class Definition:
    """A name at the top level of a user's file."""

    name: str
    #: the file that defines it: the user's, or one that the user's file imports
    file: str
    line: int
    #: whether the user's file defines it
    own: bool
    is_class: bool
    #: of the function, or of the class's constructor; None if it is neither, or cannot be determined
    signature: Signature | None
    #: of a class: its methods, including inherited ones
    methods: dict[str, Signature]
    #: of a class: the names of its base classes
    ancestors: frozenset[str]
    #: names that its code uses and nothing defines, with their lines
    undefined: dict[str, int]

    def __str__(self) -> str:
        if self.signature is None:
            return self.name
        return f"{'class ' if self.is_class else ''}{self.name}{self.signature.text}"


def definitions_in(module: ModuleType) -> Iterator[Definition]:
    """The names of a module, except imported modules and `__names__`; those that it defines itself come first."""
    found = [
        _definition(module, name, value)
        for name, value in vars(module).items()
        if name[:2] != "__" and not inspect.ismodule(value)
    ]
    yield from sorted(found, key=lambda one: (not one.own, one.line))


def _definition(module: ModuleType, name: str, value: Any) -> Definition:
    file, line = str(module.__file__), 1
    if inspect.isclass(value) or inspect.isroutine(value):
        try:
            inner = inspect.unwrap(value)
            file, line = inspect.getsourcefile(inner) or file, inspect.getsourcelines(inner)[1]
        except (TypeError, OSError, ValueError):
            pass
    is_class = inspect.isclass(value)
    own = is_class or inspect.isroutine(value)
    return Definition(
        name=name,
        file=file,
        line=line,
        own=own and getattr(value, "__module__", None) == module.__name__ and value.__name__ == name,
        is_class=is_class,
        signature=Signature.of(value) if callable(value) else None,
        methods=dict(_methods(value)) if is_class else {},
        ancestors=frozenset(base.__name__ for base in value.__mro__[1:]) if is_class else frozenset(),
        undefined=undefined_names(module, value),
    )


def _methods(made: type) -> Iterator[tuple[str, Signature]]:
    for name, member in inspect.getmembers(made, inspect.isroutine):
        plain = inspect.isfunction(inspect.getattr_static(made, name))
        if name[0] != "_" and (signature := Signature.of(member, bound=not plain)) is not None:
            yield name, signature


class ByName:
    """A callable that is called with the offered values for which it has parameters."""

    def __init__(self, function: Callable[..., Any], title: str) -> None:
        #: its name for messages
        self.title = title
        self.is_async = inspect.iscoroutinefunction(function)
        self._function = function
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError):
            self._signature = inspect.Signature()
        self.names = frozenset(name for name, one in self._signature.parameters.items() if one.kind not in _VARIADIC)

    @classmethod
    def load(cls, local: LocalFunction) -> ByName:
        """The function or class that a reference names. Raises `PluginLoadError`."""
        return cls(local.load(), local.title)

    def __call__(self, **offered: Any) -> Any:
        """Call it with the offered values for which it has parameters."""
        chosen = {name: offered[name] for name in self._signature.parameters if name in offered and name in self.names}
        bound = inspect.BoundArguments(self._signature, chosen)
        return self._function(*bound.args, **bound.kwargs)


def args_of(context: Context) -> ArgsView | None:
    """The value of the parameter `args`: the run's options as attributes; None without a run."""
    # It imports the table of all options, which the probe process does not need.
    from slime.compat.args_view import ArgsView

    config: Any = context.config
    return None if config is None else ArgsView(config)
