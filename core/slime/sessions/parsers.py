"""Tool-call parsers for tools that a client declares with its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.chat import SGLangParser, TagParser, ToolCallParser
from slime.sessions.messages import tools_key
from slime.sessions.session import ParserFactory

#: parsers kept, for agents that declare tools of their own for every task
_KEPT = 64


@dataclass(frozen=True, slots=True)
class _Declared:
    schema: dict[str, Any]


def parser_factory(name: str, tokenizer: Any) -> ParserFactory:
    """`tags` for `slime.chat.TagParser`, else the name of one of SGLang's (`--tool-call-parser`).

    Raises `ValueError` for a parser that SGLang does not have.
    """
    if name == "tags":
        tags = TagParser()
        return lambda _: tags
    SGLangParser(name, [], tokenizer)
    made: dict[bytes, ToolCallParser] = {}

    def parser(tools: Sequence[Mapping[str, Any]]) -> ToolCallParser:
        key = tools_key(tools)
        if key not in made:
            if len(made) >= _KEPT:
                made.clear()
            made[key] = SGLangParser(name, [_Declared(dict(tool)) for tool in tools], tokenizer)
        return made[key]

    return parser
