"""Parameters by name: read from source text or from a live callable, and filled from what is on offer."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Parameter:
    """One named parameter."""

    name: str
    required: bool
    positional_only: bool = False


@dataclass(frozen=True, slots=True)
class Parameters:
    """The named parameters of a function, without a method's first; `*args` and `**kwargs` take nothing."""

    named: tuple[Parameter, ...]
    #: as written, for messages: "(args, sample: Sample, **kwargs)"
    text: str

    @classmethod
    def written(cls, arguments: ast.arguments, *, method: bool = False) -> Parameters:
        """Those of a `def` in source text."""
        plain = [*arguments.posonlyargs, *arguments.args]
        defaults = len(plain) - len(arguments.defaults)
        named = [
            Parameter(argument.arg, place < defaults, place < len(arguments.posonlyargs))
            for place, argument in enumerate(plain)
        ][1 if method else 0 :]
        named += [
            Parameter(argument.arg, default is None)
            for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        ]
        return cls(tuple(named), f"({ast.unparse(arguments)})")

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Parameters:
        """Those of a live callable; none where Python cannot tell."""
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return cls((), "(...)")
        named = [
            Parameter(parameter.name, parameter.default is parameter.empty, parameter.kind is parameter.POSITIONAL_ONLY)
            for parameter in signature.parameters.values()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        return cls(tuple(named), str(signature))

    @property
    def names(self) -> frozenset[str]:
        """All names."""
        return frozenset(parameter.name for parameter in self.named)

    @property
    def required(self) -> frozenset[str]:
        """Names without a default."""
        return frozenset(parameter.name for parameter in self.named if parameter.required)

    def call(self, function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
        """Call `function` with those of the offered values that it asks for."""
        by_place: list[Any] = []
        by_name: dict[str, Any] = {}
        for parameter in self.named:
            if parameter.name not in offered:
                continue
            if parameter.positional_only:
                by_place.append(offered[parameter.name])
            else:
                by_name[parameter.name] = offered[parameter.name]
        return function(*by_place, **by_name)
