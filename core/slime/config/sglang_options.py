"""SGLang's server options: read from the source of the installed SGLang, set by flags that begin with `--sglang-`, and
written as words of the server's own command line.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from slime.config.flags import SGLANG, Flag
from slime.config.installed import (
    Declaration,
    annotation_of,
    class_named,
    declarations,
    literal,
    package_folder,
    parse_source,
)
from slime.config.values import Arity, ValueType, read_human_int, read_json, type_of
from slime.errors import ConfigError, did_you_mean

#: options that slime sets itself -> what users set instead, or why they cannot
RESERVED: dict[str, str] = {
    "model_path": "use --hf-checkpoint",
    "host": "engines listen where slime can reach them",
    "port": "use --engine-port, the port of the first engine",
    "nccl_port": "slime picks free ports",
    "device": "use --device",
    "base_gpu_id": "slime places the engines",
    "gpu_id_step": "slime places the engines",
    "dist_init_addr": "slime places the engines",
    "nnodes": "slime places the engines; an engine runs on one node",
    "node_rank": "slime places the engines; an engine runs on one node",
    "use_ray": "slime starts the engines",
    "config": "use the [sglang] table of the run file",
}


@dataclass(frozen=True)
class SGLangOption:
    """An option of SGLang's server."""

    key: str  #: name of its field, or of its flag if it has no field
    flag: str  #: as on SGLang's command line: "--mem-fraction-static"
    aliases: tuple[str, ...]
    type: ValueType
    help: str
    default: str  #: as written in the source
    #: whether the switch also has the form `--no-...`
    negatable: bool = False


@functools.cache
def sglang_options() -> Mapping[str, SGLangOption]:
    """Every option by key. Raises `ConfigError` if SGLang is not installed or its source has changed."""
    options: dict[str, SGLangOption] = {}
    for path in sorted(package_folder("sglang", "sglang", "srt", "arg_groups", "fields").glob("*.py")):
        for node in parse_source(path).body:
            for declaration in declarations(node.body) if isinstance(node, ast.ClassDef) else ():
                option = _from_field(declaration)
                if option is not None:
                    options[option.key] = option
    for option in _added_by_hand(package_folder("sglang", "sglang", "srt") / "server_args.py"):
        options.setdefault(option.key, option)
    return MappingProxyType(options)


def _from_field(declaration: Declaration) -> SGLangOption | None:
    """A field `name: A[type, "help"]` or `name: A[type, Arg(...)]`; None if it has no flag."""
    match declaration.annotation:
        case ast.Subscript(value=ast.Name(id="A"), slice=ast.Tuple(elts=[annotation, meta, *_])):
            pass
        case _:
            return None
    keywords = {k.arg: k.value for k in meta.keywords if k.arg} if isinstance(meta, ast.Call) else {"help": meta}
    if literal(keywords.get("no_cli")):
        return None
    flag = literal(keywords.get("cli_name")) or "--" + declaration.name.replace("_", "-")
    return SGLangOption(
        key=declaration.name,
        flag=flag,
        aliases=tuple(literal(keywords.get("aliases")) or ()),
        type=_type(annotation, keywords),
        help=_help(keywords),
        default=_source(declaration.value),
        negatable="BooleanOptionalAction" in _source(keywords.get("action")),
    )


_ARITIES = {"?": Arity.OPTIONAL, "*": Arity.ANY, "+": Arity.SOME}


def _type(annotation: ast.expr, keywords: dict[str, ast.expr]) -> ValueType:
    """The type of an option from its annotation and the hints of `Arg(...)`."""
    parser, action = _source(keywords.get("type_parser")), _source(keywords.get("action"))
    if action and "BooleanOptionalAction" not in action:
        return ValueType(list[Any], Arity.ANY)  # an action of SGLang's own, which turns words into objects
    if "human_readable_int" in parser:
        return ValueType(int, Arity.ONE, read_human_int)
    if "json" in parser:
        return ValueType(dict[str, Any] | list[Any], Arity.ONE, read_json)
    known, choices = annotation_of(annotation, {}), _choices(keywords.get("choices"))
    if parser or known is None:
        return ValueType(choices or str | dict[str, Any] | list[Any], Arity.ONE)
    kind = type_of(known)
    if keywords.get("nargs") is not None:
        arity = _ARITIES[literal(keywords["nargs"])]
        single = arity is Arity.OPTIONAL or kind.arity is Arity.SOME
        return ValueType(kind.annotation if single else list[Any], arity)
    if choices and kind.arity is Arity.ONE:
        return ValueType(choices, Arity.ONE, kind.read if known is str else read_json)
    return kind


def _added_by_hand(path: Path) -> Iterator[SGLangOption]:
    """Arguments that `ServerArgs.add_cli_args` adds in addition to the fields."""
    owner = class_named(parse_source(path), "ServerArgs")
    functions = [n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == "add_cli_args"] if owner else []
    for call in [node for function in functions for node in ast.walk(function) if isinstance(node, ast.Call)]:
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"):
            continue
        names = [n for n in map(literal, call.args) if isinstance(n, str) and n.startswith("--")]
        if not names:
            continue
        keywords = {k.arg: k.value for k in call.keywords if k.arg}
        action = _source(keywords.get("action"))
        switch = "store_true" in action or "StoreTrue" in action
        yield SGLangOption(
            key=names[0].lstrip("-").replace("-", "_"),
            flag=names[0],
            aliases=tuple(names[1:]),
            type=type_of(bool if switch else _choices(keywords.get("choices")) or str),
            help=_help(keywords),
            default="False" if switch else "",
        )


def _choices(node: ast.expr | None) -> Any | None:
    """A `Literal` of the choices of an option, if they are literals in the source.

    Named lists are not resolved, because SGLang's plugins may extend them at run time.
    """
    values = literal(node)
    return Literal[tuple(values)] if isinstance(values, list | tuple) else None


def _help(keywords: Mapping[str, ast.expr]) -> str:
    return " ".join(str(literal(keywords.get("help")) or "").split())


def _source(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def sglang_flags() -> Iterator[Flag]:
    """Every SGLang flag. Raises `ConfigError` if SGLang is not installed."""
    for option in sglang_options().values():
        names = [name.lstrip("-") for name in (option.flag, *option.aliases)]
        for name in dict.fromkeys([*names, option.key.replace("_", "-")]):
            yield Flag(
                name=f"sglang-{name}",
                target=SGLANG,
                key=option.key,
                type=option.type,
                help=option.help,
                default=option.default,
                alias_of=None if name == names[0] else f"sglang-{names[0]}",
                refusal=f"is set by slime: {RESERVED[option.key]}." if option.key in RESERVED else "",
            )


def sglang_argv(values: Mapping[str, Any]) -> list[str]:
    """`RunConfig.sglang` as words of SGLang's own command line.

    Raises `ConfigError` for an unknown option, and for a switch that cannot be turned off.
    """
    words: list[str] = []
    for key, value in values.items():
        options = sglang_options()
        if key not in options:
            raise ConfigError(f"SGLang has no option {key!r}.{did_you_mean(key, options)}")
        words += _words(options[key], value)
    return words


def _words(option: SGLangOption, value: Any) -> list[str]:
    match option.type.arity:
        case Arity.SWITCH if value:
            return [option.flag]
        case Arity.SWITCH if option.negatable:
            return [f"--no-{option.flag.removeprefix('--')}"]
        case Arity.SWITCH if option.default == "True":
            name = option.flag.removeprefix("--")
            raise ConfigError(f"--sglang-{name} cannot be turned off: SGLang has no flag for it.")
        case Arity.SWITCH:
            return []
        case Arity.SOME | Arity.ANY:
            return [option.flag, *map(_word, value)]
        case Arity.OPTIONAL if value == "":
            return [option.flag]
    word = _word(value)
    return [f"{option.flag}={word}"] if word.startswith("-") else [option.flag, word]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
