"""`slime plugins show`: where a component comes from, what it needs, and its options."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlparse

from pydantic.fields import FieldInfo

from slime.cli.text_layout import hanging, table
from slime.config.value_types import describe
from slime.registry.component import LIMITED_KINDS, CallLimits, Component
from slime.registry.find import FoundPlugin, unmet_requirements
from slime.registry.kinds import KINDS
from slime.registry.provenance import source_of

#: fields of specs that are shown with their values
_FIELDS = ("ratio", "takes_kl", "scope", "deterministic", "isolation", "needs_engine")
#: attribute of a pydantic constraint -> how it reads
_CONSTRAINTS = {
    "gt": "> {}",
    "ge": ">= {}",
    "lt": "< {}",
    "le": "<= {}",
    "multiple_of": "a multiple of {}",
    "min_length": "at least {} long",
    "max_length": "at most {} long",
    "pattern": "matches {}",
}


def component_text(component: Component) -> str:
    """The description of one component."""
    spec = component.spec
    kind = KINDS[component.kind]
    prefix = f"--{kind.slots[-1].prefixes[0]}."
    parts = [f"{kind.title} {component.id}"]
    parts += hanging("  ", spec.summary) if spec.summary else []
    parts += ["", *_facts(component), "", "options", options_table(component, prefix)]
    return "\n".join(parts)


def source_text(found: FoundPlugin) -> str:
    """`package index`, `editable /folder, commit 1a2b3c4d, modified`, or the URL it was installed from."""
    source = source_of(found)
    url = source.get("url")
    if url is None:
        return "package index"
    location = unquote(urlparse(url).path) if url.startswith("file:") else url
    parts = [f"editable {location}" if source["editable"] else location]
    if source.get("commit"):
        parts.append(f"commit {source['commit'][:12]}")
    if source.get("dirty"):
        parts.append("modified")
    return ", ".join(parts)


def _facts(component: Component) -> Iterator[str]:
    spec = component.spec
    unmet = unmet_requirements(spec.requires)
    facts = {
        "package": [f"{component.found.package}, {source_text(component.found)}"],
        "class": [spec.factory, *_class_line(spec.factory)],
        "hook": [component.origin],
        "docs": [spec.docs] if spec.docs else [],
        "requires": [f"{needed}  ({unmet.get(needed, 'installed')})" for needed in spec.requires],
        **{name: [str(getattr(spec, name))] for name in _FIELDS if hasattr(spec, name)},
        "needs": [", ".join(sorted(spec.needs))] if getattr(spec, "needs", None) else [],
    }
    for name, values in facts.items():
        for number, value in enumerate(values):
            yield from hanging(f"  {'' if number else name:<13}  ", value)


def _class_line(factory: str) -> list[str]:
    """`FILE:LINE` of a class, without importing it; empty when its module is not Python source."""
    module, _, name = factory.partition(":")
    found = find_spec(module)
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return []
    try:
        body = ast.parse(Path(found.origin).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return [found.origin]
    lines = [node.lineno for node in body if getattr(node, "name", None) == name]
    return [f"{found.origin}:{line}" for line in lines[:1]] or [found.origin]


def options_table(component: Component, prefix: str) -> str:
    """The options of a component, and the limits that slime adds to every component of its kind.

    Args:
        component: The component.
        prefix: What stands before an option's name, such as `--reward.`.
    """
    rows = []
    for model in (component.spec.options, *([CallLimits] if component.kind in LIMITED_KINDS else [])):
        for name, info in model.model_fields.items():
            default = _default(info)
            if model is CallLimits and name == "timeout_s":
                own = component.spec.timeout_s
                default = "the run's --rollout-timeout-s" if own is None else f"{own:g}"
            option = f"{prefix}{name.replace('_', '-')}"
            rows.append((option, describe(info.annotation), default, _allowed(info), info.description or ""))
    return table(("OPTION", "TYPE", "DEFAULT", "ALLOWED", "MEANING"), rows, indent="  ") if rows else "  none"


def _default(info: FieldInfo) -> str:
    """The default as written on a command line, or `required`."""
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _allowed(info: FieldInfo) -> str:
    """The constraints of an option: `> 0, <= 1`."""
    return ", ".join(
        text.format(getattr(constraint, name))
        for constraint in info.metadata
        for name, text in _CONSTRAINTS.items()
        if getattr(constraint, name, None) is not None
    )
