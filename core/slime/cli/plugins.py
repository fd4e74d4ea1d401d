"""`slime plugins`: what is installed, from where, and whether it works."""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slime.errors import ConfigError, PluginNotFoundError, did_you_mean
from slime.plugin import API_VERSION
from slime.plugins import Component, PluginFailure, PluginSet, survey_plugins
from slime.plugins.find import FoundPlugin, find_plugins
from slime.plugins.kinds import KINDS

_COLUMNS = ("PLUGIN", "VERSION", "API", "STATUS", "PROVIDES", "FROM")


@dataclass(frozen=True)
class Row:
    """One plugin, as `--json` shows it."""

    plugin: str
    distribution: str
    version: str
    entry: str
    #: comes with slime itself
    built_in: bool
    #: "ok", "clash" (a bare name of it is taken too), "broken", or "not loaded"
    status: str
    #: plugin API it was written for; null where that is not known
    api: int | None = None
    #: components: kind, name, id, summary, factory, origin
    provides: list[dict[str, str]] = field(default_factory=list)
    #: what is wrong and what to do about it, for broken ones
    problem: str | None = None
    remedy: str | None = None


def run(argv: Sequence[str]) -> int:
    """The command.  Returns 1 with `--check` when a plugin is broken or clashes; raises `SlimeError`."""
    arguments = _parser().parse_args(argv)
    if arguments.kind is not None and arguments.kind not in KINDS:
        raise ConfigError(
            f"--kind {arguments.kind}: expected one of {', '.join(KINDS)}.{did_you_mean(arguments.kind, KINDS)}"
        )
    if arguments.command == "show":
        print(_details(survey_plugins(), arguments.id, arguments.kind))
        return 0
    if arguments.no_load:
        rows, notes = [_unloaded(found) for found in find_plugins()], []
    else:
        plugins = survey_plugins()
        rows, notes = _rows(plugins, arguments.kind), plugins.registry.clashes()
        if arguments.verbose:
            notes += [_traceback(failure) for failure in plugins.failures]
    if arguments.json:
        print(json.dumps({"format": 1, "api": API_VERSION, "plugins": [asdict(row) for row in rows]}, indent=2))
    else:
        print(_table(rows, notes))
    return int(arguments.check and any(row.status in ("broken", "clash") for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slime plugins", description="List installed plugins, or show one component.", allow_abbrev=False
    )
    parser.add_argument("command", nargs="?", choices=("list", "show"), default="list", help="default: list")
    parser.add_argument("id", nargs="?", help="show: NAME or PLUGIN/NAME of a component")
    parser.add_argument("--kind", help=f"only components of one kind: {', '.join(KINDS)}")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--no-load", action="store_true", help="read metadata only; no plugin's code runs")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a plugin is broken or clashes")
    parser.add_argument("-v", "--verbose", action="store_true", help="with the tracebacks of broken plugins")
    return parser


# --- rows --------------------------------------------------------------------------------------------


def _rows(plugins: PluginSet, kind: str | None) -> list[Row]:
    """Every plugin that provides something of `kind`, and every broken one."""
    rows = []
    for plugin in plugins.plugins:
        components = [c for c in plugin.components if kind in (None, c.kind)]
        if kind is None or components:
            clash = any(_clashes(plugins, component) for component in components)
            rows.append(
                Row(
                    **_identity(plugin.found),
                    status="clash" if clash else "ok",
                    api=plugin.api,
                    provides=[_component(component) for component in components],
                )
            )
    rows += [
        Row(**_identity(f.found), status="broken", api=f.api, problem=f.problem, remedy=f.remedy)
        for f in plugins.failures
    ]
    return rows


def _clashes(plugins: PluginSet, component: Component) -> bool:
    """Whether the component's bare name does not lead to it."""
    return plugins.registry.bearers(component.kind, component.name) != [component]


def _unloaded(found: FoundPlugin) -> Row:
    return Row(**_identity(found), status="not loaded")


def _identity(found: FoundPlugin) -> dict[str, Any]:
    return {
        "plugin": found.name,
        "distribution": found.distribution,
        "version": found.version,
        "entry": found.entry,
        "built_in": found.own,
    }


def _component(component: Component) -> dict[str, str]:
    return {
        "kind": component.kind,
        "name": component.name,
        "id": component.id,
        "summary": component.spec.summary,
        "factory": component.spec.factory,
        "origin": component.origin,
    }


# --- text --------------------------------------------------------------------------------------------


def _table(rows: Sequence[Row], notes: Iterable[str]) -> str:
    lines = [
        (
            row.plugin,
            row.version,
            "-" if row.api is None else str(row.api),
            row.status,
            row.problem or ", ".join(f"{KINDS[c['kind']].title} {c['name']}" for c in row.provides) or "-",
            f"{row.distribution} (built in)" if row.built_in else row.distribution,
        )
        for row in rows
    ]
    text = [_aligned([_COLUMNS, *lines]), "", _count(rows)]
    text += [f"{row.plugin}: {row.remedy}" for row in rows if row.remedy]
    return "\n".join([*text, *notes])


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _count(rows: Sequence[Row]) -> str:
    counts = [f"{len(rows)} plugin{'s' if len(rows) != 1 else ''}"]
    for status in ("broken", "clash"):
        number = sum(row.status == status for row in rows)
        counts += [f"{number} {status}"] if number else []
    return ", ".join(counts)


def _traceback(failure: PluginFailure) -> str:
    text = "".join(traceback.format_exception(failure.exception)) if failure.exception else ""
    return f"\n--- {failure.found.name} ({failure.found.package}), entry point {failure.found.entry}\n{text}".rstrip()


def _details(plugins: PluginSet, name: str | None, kind: str | None) -> str:
    """Everything about one component: where it is from, and its options with types and defaults."""
    if name is None:
        raise ConfigError("slime plugins show needs a component: NAME or PLUGIN/NAME")
    found: list[Component] = []
    for candidate in (kind,) if kind else KINDS:
        try:
            found.append(plugins.find(candidate, name))
        except PluginNotFoundError:
            if kind:
                raise
    if not found:
        known = {c.id for c in plugins.components()} | {c.name for c in plugins.components()}
        raise ConfigError(f"no component is called {name!r}.{did_you_mean(name, known)} `slime plugins` lists them.")
    return "\n\n".join(_describe(component) for component in found)


def _describe(component: Component) -> str:
    spec = component.spec
    facts = [
        ("from", component.found.package),
        ("factory", spec.factory),
        ("registered", component.origin),
        *(
            (name, str(getattr(spec, name)))
            for name in ("ratio", "scope", "timeout_s", "needs_engine")
            if hasattr(spec, name)
        ),
    ]
    if getattr(spec, "needs", None):
        facts.append(("needs", ", ".join(sorted(spec.needs))))
    text = [f"{KINDS[component.kind].title} {component.id}", f"  {spec.summary}", "", _indented(facts)]
    options = [
        (f"{component.kind}.{name.replace('_', '-')}", _type(info), _default(info), info.description or "")
        for name, info in spec.options.model_fields.items()
    ]
    text += ["", "options:", _indented([("OPTION", "TYPE", "DEFAULT", "MEANING"), *options]) if options else "  none"]
    return "\n".join(text)


def _indented(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"  {line}" for line in _aligned(lines).splitlines())


def _type(info: Any) -> str:
    annotation = info.annotation
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return text.replace("typing.", "")


def _default(info: Any) -> str:
    return "required" if info.is_required() else repr(info.get_default(call_default_factory=True))
