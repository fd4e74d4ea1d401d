"""`slime plugins show`: everything about one component."""

from __future__ import annotations

from collections.abc import Iterator

from slime.cli.plugins.layout import aligned, folded
from slime.cli.plugins.option_text import allowed, default, type_name
from slime.cli.plugins.origin import class_line, describe_source
from slime.cli.plugins.selected import selected
from slime.plugin import Options
from slime.plugins import Component, survey_plugins
from slime.plugins.kinds import KINDS
from slime.plugins.limits import LIMITED_KINDS, Limits
from slime.plugins.requires import unmet_requirements

#: how the flags of a kind's options begin
_FLAGS = {"datasource": "--data-source", "buffer_filter": "--buffer-filter"}
#: fields of specs that are shown with their values, where a spec has them
_FIELDS = ("ratio", "takes_kl", "scope", "deterministic", "isolation", "needs_engine")


def show(name: str, kind: str | None) -> str:
    """Where a component is from, what it needs, and its options; several where the name means several.

    Raises as `slime.cli.plugins.selected.selected` does.
    """
    return "\n\n".join(_describe(component) for component in selected(survey_plugins(), name, kind))


def _describe(component: Component) -> str:
    spec = component.spec
    facts = [
        ("package", f"{component.found.package}, {describe_source(component.found)}"),
        ("class", "\n".join([spec.factory, *filter(None, [class_line(component)])])),
        ("hook", component.origin),
        *([("docs", spec.docs)] if spec.docs else []),
        *([("requires", "\n".join(_requirements(component)))] if spec.requires else []),
        *((name, str(getattr(spec, name))) for name in _FIELDS if hasattr(spec, name)),
        *([("needs", ", ".join(sorted(spec.needs)))] if getattr(spec, "needs", None) else []),
    ]
    flag = _FLAGS.get(component.kind, f"--{component.kind}")
    parts = [f"{KINDS[component.kind].title} {component.id}"]
    parts += [f"  {spec.summary}"] if spec.summary else []
    parts += ["", aligned(facts, "  "), "", "options"]
    parts.append(_options(spec.options, flag) if spec.options.model_fields else "  none")
    if component.kind in LIMITED_KINDS:
        limit = "the run's --rollout-timeout-s" if spec.timeout_s is None else f"{spec.timeout_s:g}"
        parts += ["", "limits of slime's own", _options(Limits, flag, {"timeout_s": limit})]
    return "\n".join(parts)


def _requirements(component: Component) -> Iterator[str]:
    unmet = dict(unmet_requirements(component))
    for requirement in component.spec.requires:
        yield f"{requirement}  ({unmet.get(requirement, 'installed')})"


def _options(model: type[Options], flag: str, defaults: dict[str, str] | None = None) -> str:
    rows = [("OPTION", "TYPE", "DEFAULT", "ALLOWED", "MEANING")]
    for name, info in model.model_fields.items():
        shown = (defaults or {}).get(name) or default(info)
        spelled = f"{flag}.{name.replace('_', '-')}"
        rows.append((spelled, type_name(info), shown, allowed(info), folded((info.description or "").split())))
    return aligned(rows, "  ")
