"""Settings to a `RunConfig`: the one place where values are checked, whether they come from a file or a flag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from slime.config.explain import explain
from slime.config.flags import MEGATRON, PLUGINS, SGLANG, UNAVAILABLE
from slime.config.megatron_flags import RESERVED as RESERVED_MEGATRON
from slime.config.options import SECTIONS
from slime.config.plugin_options import PluginOptions
from slime.config.run_config import RunConfig
from slime.config.settings import COMPONENT, Setting, Settings, stop_on
from slime.config.sglang_flags import RESERVED as RESERVED_SGLANG
from slime.config.unavailable import refusal
from slime.config.values import misplaced_boolean

_RESERVED = {MEGATRON: RESERVED_MEGATRON, SGLANG: RESERVED_SGLANG}


def assemble(settings: Settings) -> RunConfig:
    """The configuration that `settings` state; what they do not state keeps its default.

    Raises one `ConfigError` that tells every problem, those of reading included.
    """
    problems = list(settings.problems)
    final = {(setting.target, setting.key): setting for setting in settings.items}
    by_target: dict[str, list[Setting]] = {}
    for setting in final.values():
        by_target.setdefault(setting.target, []).append(setting)

    asynchronous = any(s.key == "async_mode" and s.value is True for s in final.values())
    for setting in by_target.get(UNAVAILABLE, []):
        assert setting.flag is not None
        problems.append(refusal(setting.flag, setting.where, asynchronous=asynchronous))
    sections: dict[str, type[BaseModel]] = {**SECTIONS, PLUGINS: PluginOptions}
    parts: dict[str, Any] = {
        name: _section(options, by_target.get(name, []), problems) for name, options in sections.items()
    }
    for target in (MEGATRON, SGLANG):
        parts[target] = _engine_options(target, by_target.get(target, []), problems)
    parts["component_options"] = {
        target.removeprefix(COMPONENT): {setting.key: setting.value for setting in items}
        for target, items in by_target.items()
        if target.startswith(COMPONENT)
    }
    stop_on(problems)
    return RunConfig(**parts)


def _section(options: type[BaseModel], items: list[Setting], problems: list[str]) -> BaseModel | None:
    """One section; None, and the reasons in `problems`, where a value does not fit."""
    before = len(problems)
    values: dict[str, Any] = {}
    where: dict[str, Setting] = {}
    for setting in items:
        field = options.model_fields[setting.key]
        name = field.alias or setting.key
        where[name] = setting
        if misplaced_boolean(setting.value, field.annotation):
            problems.append(f"{setting.where}: {_got_expected(setting)}")
        else:
            values[name] = setting.value
    try:
        section = options.model_validate(values)
    except ValidationError as error:
        for details in error.errors():
            first, *inner = details["loc"]
            setting = where[str(first)]
            problems.append(f"{setting.where}{_place(inner)}: {explain(details, _expected(setting, details))}")
        return None
    return section if len(problems) == before else None


def _place(inner: list[int | str]) -> str:
    """Where in a list of tables: `[1].weight`.  An item of a plain list is told by its value."""
    if not any(isinstance(step, str) for step in inner):
        return ""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in inner)


def _got_expected(setting: Setting) -> str:
    assert setting.flag is not None
    return f"got {str(setting.value).lower()}, expected {setting.flag.type.describe()}"


def _expected(setting: Setting, details: Mapping[str, Any]) -> str | None:
    """What the whole value should have been, unless the error is about one item of a list."""
    if setting.flag is None or len(details["loc"]) > 1:
        return None
    return setting.flag.type.describe()


def _engine_options(target: str, items: list[Setting], problems: list[str]) -> dict[str, Any]:
    """Megatron's or SGLang's options, each checked against its type."""
    values: dict[str, Any] = {}
    for setting in items:
        assert setting.flag is not None
        if setting.key in _RESERVED[target]:
            problems.append(f"{setting.where} is not for users to state: {_RESERVED[target][setting.key]}.")
            continue
        try:
            values[setting.key] = setting.flag.type.check(setting.value)
        except ValueError as error:
            problems.append(f"{setting.where}: {error}")
    return values
