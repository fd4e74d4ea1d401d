"""A component's options, checked against its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from slime.errors import ConfigError, did_you_mean
from slime.plugin import Options
from slime.plugins.component import Component


def checked_options(component: Component, options: Mapping[str, Any]) -> Options:
    """The component's options model.

    Raises `ConfigError` that names component and option for every option that is misspelt, missing or wrong.
    """
    model: type[Options] = component.spec.options
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        problems = [_problem(dict(entry), model) for entry in error.errors(include_url=False)]
    raise ConfigError(f"options of {component.title}: {'; '.join(problems)}")


def _problem(entry: dict[str, Any], model: type[Options]) -> str:
    place = ".".join(map(str, entry["loc"])) or "all"
    if entry["type"] == "extra_forbidden":
        known = list(model.model_fields)
        return f"no option {place!r}.{did_you_mean(place, known)} Options: {', '.join(known) or 'none'}"
    if entry["type"] == "missing":
        return f"{place!r} is required"
    return f"{place!r} is {entry['input']!r}: {entry['msg']}"
