"""Tools: plain typed Python functions, and the JSON schema that describes them to a model."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from slime.errors import did_you_mean
from slime.registry.function_path import Reference, run_file

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_ARGUMENTS = re.compile(r"^\s*(args|arguments|parameters)\s*:?\s*$", re.IGNORECASE)
_SECTION = re.compile(r"^\s*(returns|raises|yields|examples?|notes?)\s*:\s*$", re.IGNORECASE)
_ARGUMENT = re.compile(r"^\s+(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    #: what it does, for the model
    description: str
    function: Callable[..., Any]
    #: what its arguments are checked against
    arguments: type[BaseModel]

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The JSON schema for chat templates and OpenAI-compatible endpoints."""
        parameters = _without_titles(self.arguments.model_json_schema())
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of one call with their defaults, converted to the types of the signature.

        Raises:
            ValueError: In words for the model.
        """
        try:
            checked = self.arguments.model_validate(dict(arguments))
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in error.errors()[:3]
            )
            raise ValueError(f"wrong arguments for {self.name}: {problems}") from None
        return {name: getattr(checked, name) for name in type(checked).model_fields}


def tool_of(function: Callable[..., Any], *, name: str | None = None) -> Tool:
    """Make a tool of a function: name, description and arguments come from its signature and docstring.

        def search(query: str, top_k: int = 3) -> str:
            \"\"\"Search the encyclopedia.

            Args:
                query: what to look for
                top_k: how many passages
            \"\"\"

    Every argument needs a type that JSON can express. `async def` is awaited; other functions run in a thread.

    Raises:
        ValueError: If the function cannot be a tool.
    """
    name = name or str(getattr(function, "__name__", type(function).__name__))
    label = f"tool {name}"
    if not _NAME.fullmatch(name):
        raise ValueError(f"{label}: a tool's name has letters, digits, _ and -, at most 64")
    description, notes = _docstring(inspect.getdoc(function) or "")
    if not description:
        raise ValueError(f"{label} has no docstring, which describes it to the model")
    try:
        signature, hints = inspect.signature(function), _hints(function)
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(f"{label}: its signature cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for argument, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{label}: argument {argument!r} cannot be passed by name, expected plain named arguments")
        if argument not in hints:
            raise ValueError(f"{label}: argument {argument!r} has no type, expected something like `{argument}: str`")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[argument] = (hints[argument], Field(default=default, description=notes.get(argument)))
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except (PydanticUserError, TypeError, NameError, ValueError) as error:
        raise ValueError(f"{label}: JSON cannot express its arguments: {error}") from error
    return Tool(name, description, function, model)


def load_tools(names: Sequence[str], known: Mapping[str, str | Callable[..., Any]]) -> list[Tool]:
    """Load tools by name or reference.

    Args:
        names: Names in `known`, or references `package.module:NAME` and `FILE.py:NAME`.
        known: Name -> function or reference.

    Raises:
        ValueError: For an unknown name, a function that cannot be loaded, and two tools of one name.
    """
    tools: dict[str, Tool] = {}
    for name in names:
        if ":" not in name and name not in known:
            raise ValueError(
                f"no tool is called {name!r}; known: {', '.join(sorted(known))}, or one of your own as"
                f" package.module:NAME or FILE.py:NAME."
                f"{did_you_mean(name, known)}"
            )
        try:
            named = known.get(name, name)
            function = load_function(named) if isinstance(named, str) else named
        except ValueError as error:
            raise ValueError(f"tool {error}") from error
        tool = tool_of(function)
        if tool.name in tools:
            raise ValueError(f"two tools are called {tool.name!r}; a function's name is its tool's name")
        tools[tool.name] = tool
    return list(tools.values())


def load_function(reference: str) -> Callable[..., Any]:
    """Load the function that `package.module:NAME` or `FILE.py:NAME` refers to.

    A file is run once in a process; files beside it can be imported.

    Raises:
        ValueError: If there is no such function, or its module cannot be loaded.
    """
    parsed = Reference.parse(reference)
    if parsed.name is None:
        raise ValueError(f"{reference!r} names no function; expected {reference}:NAME")
    try:
        if parsed.file is None:
            module = importlib.import_module(parsed.module)
        else:
            module = run_file(parsed.file, parsed.file.read_bytes())
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise ValueError(f"{reference!r} cannot be loaded: {type(error).__name__}: {error}") from error
    function = getattr(module, parsed.name, None)
    if function is None:
        raise ValueError(f"{reference!r}: {parsed.file or parsed.module} has no function {parsed.name!r}")
    if not callable(function):
        raise ValueError(f"{reference!r} is a {type(function).__name__}, expected a function")
    return function  # type: ignore[no-any-return]  # its types are the user's own


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    plain = inspect.isroutine(function)
    hints = get_type_hints(function if plain else type(function).__call__, include_extras=True)
    hints.pop("return", None)
    return hints


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text of a docstring before its sections, and its description of each argument."""
    summary: list[str] = []
    notes: dict[str, str] = {}
    section, latest = "", ""
    for line in text.splitlines():
        if _ARGUMENTS.match(line):
            section = "arguments"
        elif _SECTION.match(line):
            section = "other"
        elif not section:
            summary.append(line.strip())
        elif section == "arguments" and (found := _ARGUMENT.match(line)):
            latest = found[1]
            notes[latest] = found[2].strip()
        elif section == "arguments" and latest and line.strip():
            notes[latest] = f"{notes[latest]} {line.strip()}".strip()
    return " ".join(part for part in summary if part), notes


def _without_titles(schema: Any) -> Any:
    """pydantic's schema without the titles it derives from names, which only cost tokens."""
    if isinstance(schema, list):
        return [_without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(part) for name, part in value.items()}
        if key in ("properties", "$defs")
        else _without_titles(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str)) and not (key == "additionalProperties" and value is False)
    }
