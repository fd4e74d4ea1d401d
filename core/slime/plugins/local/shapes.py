"""The ways in which a function or class may be called, and what tells whether it is written for one of them."""

from __future__ import annotations

from dataclasses import dataclass

from slime.plugin import ComponentSpec
from slime.plugins.local.definitions import Class, Definition, Function


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to be called.  Parameters are matched by name."""

    #: as shown where nothing fits
    text: str
    #: parameters that make it this shape
    core: frozenset[str]
    #: all parameters that it can fill
    offers: frozenset[str]
    #: "package.module:Name" of what makes a component of it
    adapter: str
    #: of a class: the method that is called; the parameters above are that method's
    method: str = ""
    #: of a class: what its constructor may ask for
    constructor: frozenset[str] = frozenset()
    #: True: only `async def`; False: only `def`; None: either
    asynchronous: bool | None = None
    #: how many values are passed by place, whatever the parameters are called; None: all go by name
    by_place: int | None = None
    #: of a reward: called with all samples of a prompt
    whole_groups: bool = False

    def misfit(self, found: Definition) -> str | None:
        """Why a definition is not of this shape; None where it is."""
        if isinstance(found, Function) and not self.method:
            return self._unfit(found)
        if isinstance(found, Class) and self.method:
            return self._unfit_class(found)
        kinds = {Function: "a function", Class: "a class"}
        return f"it is {kinds[type(found)]}" if type(found) in kinds else "its parameters cannot be read"

    def _unfit_class(self, found: Class) -> str | None:
        called = found.methods.get(self.method)
        if called is None:
            return f"it has no method {self.method}" if found.complete else None
        if (unfit := self._unfit(called)) is not None:
            return f"{called}: {unfit}"
        constructor = found.methods.get("__init__")
        surplus = constructor.parameters.required - self.constructor if constructor is not None else ()
        return f"its constructor asks for {', '.join(sorted(surplus))}" if surplus else None

    def _unfit(self, function: Function) -> str | None:
        parameters = function.parameters
        if self.by_place is not None:
            if len(parameters.required) > self.by_place:
                return f"it asks for {len(parameters.required)} values and gets {self.by_place}"
        elif missing := sorted(self.core - parameters.names):
            return f"no parameter is called {' or '.join(missing)}"
        elif surplus := sorted(parameters.required - self.offers):
            return f"nothing fills the parameter {', '.join(surplus)}"
        if self.asynchronous is not None and function.is_async != self.asynchronous:
            return f"it is {'no' if self.asynchronous else 'an'} `async def`"
        return None


@dataclass(frozen=True, slots=True)
class Role:
    """What a reference is for."""

    name: str
    #: as people call it
    title: str
    shapes: tuple[Shape, ...]
    #: names that need not be stated; those of one tuple stand side by side, an earlier tuple goes first
    usual: tuple[tuple[str, ...], ...] = ()
    #: the spec class of its component
    spec: type[ComponentSpec] = ComponentSpec

    def shape_of(self, found: Definition) -> Shape | None:
        """The first shape that a definition has."""
        return next((shape for shape in self.shapes if shape.misfit(found) is None), None)

    @property
    def expected(self) -> str:
        """All shapes, for messages."""
        return "; or ".join(shape.text for shape in self.shapes)

    def why_not(self, found: Definition) -> str:
        """Why a definition has none of the shapes: of the shape that it comes nearest to."""
        # A shape whose telling parameters are all there is the one that was meant.
        names = found.parameters.names if isinstance(found, Function) else frozenset()

        def nearness(shape: Shape) -> tuple[bool, bool, int]:
            return bool(shape.method) == isinstance(found, Class), shape.core <= names, len(shape.core & names)

        nearest = max(self.shapes, key=nearness)
        return nearest.misfit(found) or ""
