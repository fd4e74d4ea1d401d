"""Tools: plain typed Python functions, and the JSON schema that tells a model of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from slime.chat.functions import load_function
from slime.errors import did_you_mean

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
        """As chat templates and OpenAI-compatible endpoints take it."""
        parameters = _without_titles(self.arguments.model_json_schema())
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of one call with their defaults, converted to the types of the signature.

        Raises `ValueError` in the model's terms.
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
    """The tool that a function is: name, description and arguments from its signature and docstring.

        def search(query: str, top_k: int = 3) -> str:
            \"\"\"Search the encyclopedia.

            Args:
                query: what to look for
                top_k: how many passages
            \"\"\"

    Every argument needs a type that JSON can carry.  `async def` is awaited; other functions run in a thread.

    Raises `ValueError` for a function that cannot be a tool, saying why.
    """
    name = name or str(getattr(function, "__name__", type(function).__name__))
    where = f"tool {name}"
    if not _NAME.fullmatch(name):
        raise ValueError(f"{where}: a tool's name has letters, digits, _ and -, at most 64")
    description, notes = _docstring(inspect.getdoc(function) or "")
    if not description:
        raise ValueError(f"{where} has no docstring, which is what tells the model what it does")
    try:
        signature, hints = inspect.signature(function), _hints(function)
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: its signature cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for argument, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"{where}: argument {argument!r} has no name to be called by, expected plain named arguments"
            )
        if argument not in hints:
            raise ValueError(f"{where}: argument {argument!r} has no type, expected something like `{argument}: str`")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[argument] = (hints[argument], Field(default=default, description=notes.get(argument)))
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except (PydanticUserError, TypeError, NameError, ValueError) as error:
        raise ValueError(f"{where}: JSON cannot carry its arguments: {error}") from error
    return Tool(name, description, function, model)


def load_tools(names: Sequence[str], known: Mapping[str, str]) -> list[Tool]:
    """Tools by name: one of `known` (name -> "module:function"), "module:function" itself, or "FILE.py:function".

    Raises `ValueError` for a name that is neither, one that cannot be imported, and two tools of one name.
    """
    tools: dict[str, Tool] = {}
    for name in names:
        if ":" not in name and name not in known:
            raise ValueError(
                f"no tool is called {name!r}; known: {', '.join(sorted(known))}, or one of your own as"
                f" module:function or FILE.py:function."
                f"{did_you_mean(name, known)}"
            )
        tool = tool_of(_named(known.get(name, name)))
        if tool.name in tools:
            raise ValueError(f"two tools are called {tool.name!r}; a function's name is its tool's name")
        tools[tool.name] = tool
    return list(tools.values())


def _named(reference: str) -> Callable[..., Any]:
    try:
        return load_function(reference)
    except ValueError as error:
        raise ValueError(f"tool {error}") from error


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    plain = inspect.isroutine(function)
    hints = get_type_hints(function if plain else type(function).__call__, include_extras=True)
    hints.pop("return", None)
    return hints


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says before its sections, and what it says of each argument."""
    said: list[str] = []
    notes: dict[str, str] = {}
    section, latest = "", ""
    for line in text.splitlines():
        if _ARGUMENTS.match(line):
            section = "arguments"
        elif _SECTION.match(line):
            section = "other"
        elif not section:
            said.append(line.strip())
        elif section == "arguments" and (found := _ARGUMENT.match(line)):
            latest = found[1]
            notes[latest] = found[2].strip()
        elif section == "arguments" and latest and line.strip():
            notes[latest] = f"{notes[latest]} {line.strip()}".strip()
    return " ".join(part for part in said if part), notes


def _without_titles(schema: Any) -> Any:
    """pydantic's schema without the titles it makes of names, which cost tokens and say nothing."""
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
