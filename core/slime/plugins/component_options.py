"""A component's options, checked against its model, and the kernel's limits beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from slime.errors import ConfigError, did_you_mean
from slime.plugin import Options
from slime.plugins.component import Component
from slime.plugins.limits import LIMITED_KINDS, Limits, split_limits


def checked_options(component: Component, options: Mapping[str, Any]) -> tuple[Options, Limits]:
    """The component's options model, and its limits.

    Raises `ConfigError` that names component and option for every option that is misspelt, missing or wrong.
    """
    limits, own = split_limits(component.kind, options)
    problems: list[str] = []
    checked_limits = _checked(Limits, limits, component, problems)
    checked_own = _checked(component.spec.options, own, component, problems)
    if checked_limits is None or checked_own is None:
        raise ConfigError(f"options of {component.title}: {'; '.join(problems)}")
    assert isinstance(checked_limits, Limits)
    return checked_own, checked_limits


def _checked(
    model: type[Options], options: Mapping[str, Any], component: Component, problems: list[str]
) -> Options | None:
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        problems += [_problem(dict(entry), component) for entry in error.errors(include_url=False)]
    return None


def _problem(entry: dict[str, Any], component: Component) -> str:
    place = ".".join(map(str, entry["loc"])) or "all"
    if entry["type"] == "extra_forbidden":
        known = [
            *component.spec.options.model_fields,
            *(Limits.model_fields if component.kind in LIMITED_KINDS else ()),
        ]
        return f"no option {place!r}.{did_you_mean(place, known)} Options: {', '.join(known) or 'none'}"
    if entry["type"] == "missing":
        return f"{place!r} is required"
    return f"{place!r} is {entry['input']!r}: {entry['msg']}"
