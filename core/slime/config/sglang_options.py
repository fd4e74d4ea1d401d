"""SGLang's server options: read from the source of the installed SGLang, set by flags that begin with `--sglang-`, and
written as words of the server's own command line.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from slime.config.flags import SGLANG, Flag
from slime.config.installed import (
    Declaration,
    annotation_of,
    declarations,
    known_options,
    literal,
    package_folder,
    parse_source,
    with_range,
)
from slime.config.value_types import Arity, ValueType, read_human_int, read_json, type_of
from slime.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from slime.config.run_config import RunConfig


@functools.cache
def sglang_flags() -> Mapping[str, Flag]:
    """Every SGLang flag by name; the main spelling of an option comes before the others.

    Raises `ConfigError` if SGLang is not installed or its source has changed.
    """
    flags: dict[str, Flag] = {}
    for path in sorted(package_folder("sglang", "sglang", "srt", "arg_groups", "fields").glob("*.py")):
        for node in parse_source(path).body:
            for declaration in declarations(node.body) if isinstance(node, ast.ClassDef) else ():
                flags.update((flag.name, flag) for flag in _of_field(declaration))
    fields = {flag.key for flag in flags.values()}
    by_hand = _added_by_hand(package_folder("sglang", "sglang", "srt") / "server_args.py")
    return MappingProxyType(flags | {flag.name: flag for flag in by_hand if flag.key not in fields})


def _of_field(declaration: Declaration) -> Iterator[Flag]:
    """The flags of a field `name: A[type, "help"]` or `name: A[type, Arg(...)]`, if it has any."""
    match declaration.annotation:
        case ast.Subscript(value=ast.Name(id="A"), slice=ast.Tuple(elts=[annotation, meta, *_])):
            pass
        case _:
            return
    keywords = {k.arg: k.value for k in meta.keywords if k.arg} if isinstance(meta, ast.Call) else {"help": meta}
    if literal(keywords.get("no_cli")):
        return
    name = literal(keywords.get("cli_name")) or declaration.name.replace("_", "-")
    names = [name, *(literal(keywords.get("aliases")) or ())]
    kind = _type(annotation, keywords)
    kind = replace(kind, annotation=with_range("sglang", declaration.name, kind.annotation))
    yield from _spellings(declaration.name, names, kind, keywords, _source(declaration.value))


def _spellings(
    key: str, names: Sequence[str], kind: ValueType, keywords: Mapping[str, ast.expr], default: str
) -> Iterator[Flag]:
    """The flags of an option: the main one, its aliases, and the name of its field."""
    reserved = known_options("sglang")["reserved"]
    first, *others = dict.fromkeys(f"sglang-{name.lstrip('-')}" for name in (*names, key.replace("_", "-")))
    main = Flag(
        name=first,
        target=SGLANG,
        key=key,
        type=kind,
        help=" ".join(str(literal(keywords.get("help")) or "").split()),
        default=default,
        negatable="BooleanOptionalAction" in _source(keywords.get("action")),
        refusal=f"is set by slime: {reserved[key]}." if key in reserved else "",
    )
    yield main
    yield from (replace(main, name=name, alias_of=first) for name in others)


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


def _added_by_hand(path: Path) -> Iterator[Flag]:
    """The flags that `ServerArgs.add_cli_args` adds in addition to the fields."""
    for call in ast.walk(parse_source(path)):
        if not (
            isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        ):
            continue
        names = [n for n in map(literal, call.args) if isinstance(n, str) and n.startswith("--")]
        if not names:
            continue
        keywords = {k.arg: k.value for k in call.keywords if k.arg}
        action = _source(keywords.get("action"))
        switch = "store_true" in action or "StoreTrue" in action
        kind = type_of(bool if switch else _choices(keywords.get("choices")) or str)
        key = names[0].lstrip("-").replace("-", "_")
        yield from _spellings(key, names, kind, keywords, "False" if switch else "")


def _choices(node: ast.expr | None) -> Any | None:
    """A `Literal` of the choices of an option, if they are literals in the source.

    Named lists are not resolved, because SGLang's plugins may extend them at run time.
    """
    values = literal(node)
    return Literal[tuple(values)] if isinstance(values, list | tuple) else None


def _source(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def engine_options(config: RunConfig) -> list[str]:
    """What a run's configuration adds to SGLang's command line."""
    trusted = ["--trust-remote-code"] if config.checkpoint.trust_remote_code else []
    options = dict(config.sglang)
    if config.sync.inflight_kv == "keep":
        # Requests in flight over an update leave prefixes computed with the old weights. SGLang cannot flush them while
        # any request runs, and would give them to later requests.
        options["disable_radix_cache"] = True
    return [*sglang_argv(options), *trusted]


def sglang_argv(values: Mapping[str, Any]) -> list[str]:
    """`RunConfig.sglang` as words of SGLang's own command line.

    Raises `ConfigError` for an unknown option, and for a switch that cannot be turned off.
    """
    words: list[str] = []
    main = {flag.key: flag for flag in sglang_flags().values() if flag.alias_of is None} if values else {}
    for key, value in values.items():
        if key not in main:
            raise ConfigError(f"SGLang has no option {key!r}.{did_you_mean(key, main)}")
        words += _words(main[key], value)
    return words


def _words(flag: Flag, value: Any) -> list[str]:
    name = flag.name.removeprefix("sglang-")
    match flag.type.arity:
        case Arity.SWITCH if value:
            return [f"--{name}"]
        case Arity.SWITCH if flag.negatable:
            return [f"--no-{name}"]
        case Arity.SWITCH if flag.default == "True":
            raise ConfigError(f"{flag.spelled} cannot be turned off: SGLang has no flag for it.")
        case Arity.SWITCH:
            return []
        case Arity.SOME | Arity.ANY:
            return [f"--{name}", *map(_word, value)]
        case Arity.OPTIONAL if value == "":
            return [f"--{name}"]
    word = _word(value)
    return [f"--{name}={word}"] if word.startswith("-") else [f"--{name}", word]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
