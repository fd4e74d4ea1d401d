"""The server options of the installed SGLang, read from source: its annotated fields, and the arguments
its parser adds by hand."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slime.config.annotations import annotation_of
from slime.config.installed import Declared, class_named, declarations, package_folder, parse_source
from slime.config.values import Arity, ValueType, read_human_int, read_json, type_of


@dataclass(frozen=True)
class SGLangOption:
    """One option of SGLang's server."""

    key: str  #: its field, or the flag's name where it has none
    flag: str  #: as on SGLang's command line: "--mem-fraction-static"
    aliases: tuple[str, ...]
    type: ValueType
    help: str
    default: str  #: as written in the source
    #: a switch that also has the form `--no-...`
    negatable: bool = False


@functools.cache
def sglang_options() -> Mapping[str, SGLangOption]:
    """Every option by key.  Raises `ConfigError` when SGLang is missing or laid out otherwise."""
    root = package_folder("sglang", "sglang", "srt")
    options: dict[str, SGLangOption] = {}
    for path in sorted(package_folder("sglang", "sglang", "srt", "arg_groups", "fields").glob("*.py")):
        for node in parse_source(path).body:
            if isinstance(node, ast.ClassDef):
                for declared in declarations(node.body):
                    option = _from_field(declared)
                    if option is not None:
                        options[option.key] = option
    for option in _added_by_hand(root / "server_args.py"):
        options.setdefault(option.key, option)
    return MappingProxyType(options)


def _from_field(declared: Declared) -> SGLangOption | None:
    """A field `name: A[type, "help"]` or `name: A[type, Arg(...)]`; None for one without a flag."""
    match declared.annotation:
        case ast.Subscript(value=ast.Name(id="A"), slice=ast.Tuple(elts=[annotation, meta, *_])):
            pass
        case _:
            return None
    keywords = {k.arg: k.value for k in meta.keywords if k.arg} if isinstance(meta, ast.Call) else {"help": meta}
    if _literal(keywords.get("no_cli")):
        return None
    flag = _literal(keywords.get("cli_name")) or "--" + declared.name.replace("_", "-")
    return SGLangOption(
        key=declared.name,
        flag=flag,
        aliases=tuple(_literal(keywords.get("aliases")) or ()),
        type=_type(annotation, keywords),
        help=" ".join(str(_literal(keywords.get("help")) or "").split()),
        default="" if declared.value is None else ast.unparse(declared.value),
        negatable="BooleanOptionalAction" in _source(keywords.get("action")),
    )


_ARITIES = {"?": Arity.MAYBE, "*": Arity.ANY, "+": Arity.SOME}


def _type(annotation: ast.expr, keywords: dict[str, ast.expr]) -> ValueType:
    """The type of an option from its annotation and the hints of `Arg(...)`."""
    parser, action = _source(keywords.get("type_parser")), _source(keywords.get("action"))
    if action and "BooleanOptionalAction" not in action:
        return ValueType(list[Any], Arity.ANY)  # an action of SGLang's own, which takes words and makes objects
    known = annotation_of(annotation, {})
    if "human_readable_int" in parser:
        return ValueType(int, Arity.ONE, read_human_int)
    if "json" in parser:
        return ValueType(dict[str, Any] | list[Any], Arity.ONE, read_json)
    allowed = _choices(keywords.get("choices"))
    if parser or known is None:
        return ValueType(str | dict[str, Any] | list[Any], Arity.ONE, choices=allowed)
    if keywords.get("nargs") is not None:
        several = type_of(known)
        item = several.annotation if several.arity is Arity.SOME else known
        arity = _ARITIES[_literal(keywords["nargs"])]
        if arity is not Arity.MAYBE and several.arity is not Arity.SOME:
            item = list[Any]
        return ValueType(item, arity, choices=allowed)
    kind = type_of(known)
    if kind.arity is Arity.ONE and kind.choices is None:
        return ValueType(kind.annotation, kind.arity, kind.read, allowed)
    return kind


def _added_by_hand(path: Path) -> Iterator[SGLangOption]:
    """Arguments that `ServerArgs.add_cli_args` adds itself, outside the annotated fields."""
    owner = class_named(parse_source(path), "ServerArgs")
    functions = [n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == "add_cli_args"] if owner else []
    for call in [node for function in functions for node in ast.walk(function) if isinstance(node, ast.Call)]:
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"):
            continue
        names = [n for n in map(_literal, call.args) if isinstance(n, str) and n.startswith("--")]
        if not names:
            continue
        keywords = {k.arg: k.value for k in call.keywords if k.arg}
        action = _source(keywords.get("action"))
        switch = "store_true" in action or "StoreTrue" in action
        allowed = _choices(keywords.get("choices"))
        yield SGLangOption(
            key=names[0].lstrip("-").replace("-", "_"),
            flag=names[0],
            aliases=tuple(names[1:]),
            type=ValueType(bool, Arity.SWITCH) if switch else ValueType(str, Arity.ONE, choices=allowed),
            help=" ".join(str(_literal(keywords.get("help")) or "").split()),
            default="False" if switch else "",
        )


def _choices(node: ast.expr | None) -> tuple[Any, ...] | None:
    """The choices of an option, where they are written out.  Named lists are not looked up: SGLang's plugins
    may add to those when it runs."""
    values = _literal(node)
    return tuple(values) if isinstance(values, list | tuple) else None


def _literal(node: ast.expr | None) -> Any:
    """The value of a literal; None where there is none or it is computed."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _source(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)
