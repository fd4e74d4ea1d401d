"""Builds a `RunConfig` from a command line or a run file, and checks the types of all values."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError, create_model

from slime.config.checks import config_problems
from slime.config.choices import override
from slime.config.command_line import CommandLine
from slime.config.defaults import resolve
from slime.config.flags import COMPONENT, MEGATRON, SGLANG, Setting, Settings
from slime.config.run_config import SECTIONS, RunConfig
from slime.config.run_file import parse_run_file, read_run_file
from slime.config.section import Section
from slime.config.value_types import explain, is_union, unusable
from slime.errors import ConfigError
from slime.errors.redaction import redacted
from slime.registry.kinds import SLOTS, Slot

#: pydantic's codes for a number that is out of its range
_BOUND_ERRORS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def load_config(argv: Sequence[str]) -> RunConfig:
    """The complete configuration of `slime train ARGV`, with all checks that need neither the model nor the data.

    Raises one `ConfigError` that lists every problem found.
    """
    config = resolve(read_config(argv))
    stop_on(config_problems(config))
    return config


def read_config(argv: Sequence[str]) -> RunConfig:
    """The configuration in `[run.toml] [--flag value]...`; flags take precedence. No defaults are derived.

    Raises one `ConfigError` that lists every problem found.
    """
    line = CommandLine(argv)
    file = Settings() if line.file is None else read_run_file(line.file)
    return assemble(override(file, line.settings))


def config_from_toml(text: str, name: str | Path = "run file") -> RunConfig:
    """The configuration in the text of a run file; the inverse of `RunConfig.to_toml`. `name` is for messages.

    Raises one `ConfigError` that lists every problem found.
    """
    return assemble(parse_run_file(text, str(name)))


def stop_on(problems: Iterable[str]) -> None:
    """Raise one `ConfigError` that lists all `problems`, if there are any."""
    found = list(dict.fromkeys(problems))
    if len(found) == 1:
        raise ConfigError(found[0])
    if found:
        raise ConfigError(f"{len(found)} problems:\n" + "\n".join(f"  - {problem}" for problem in found))


def assemble(settings: Settings) -> RunConfig:
    """The configuration with these settings.

    Raises one `ConfigError` that lists every problem, including those found while reading.
    """
    problems = list(settings.problems)
    stated: dict[str, dict[str, Setting]] = {}
    for (target, key), setting in settings.items.items():
        if setting.flag is not None and setting.flag.refusal:
            problems.append(f"{setting.where} {setting.flag.refusal}")
        elif (wrong := unusable(setting.value)) is not None:
            problems.append(f"{setting.where}{wrong}")
        else:
            stated.setdefault(target, {})[key] = setting

    parts: dict[str, Any] = {"component_options": {}}
    for slot in SLOTS.values():
        options = stated.pop(COMPONENT + slot.name, {})
        if slot.repeated and options:
            _assign_options(slot, options, stated.setdefault(slot.section, {}), problems)
        elif options:
            parts["component_options"][slot.name] = {key: setting.value for key, setting in options.items()}
    for target, items in stated.items():
        if target in SECTIONS:
            parts[target] = _checked(SECTIONS[target], items, problems)
        elif target in (MEGATRON, SGLANG):
            fields: dict[str, Any] = {key: (s.flag.type.annotation, ...) for key, s in items.items() if s.flag}
            parts[target] = dict(_checked(create_model(target, __base__=Section, **fields), items, problems) or {})
    stop_on(problems)
    return RunConfig(**parts)


def _checked(options: type[Section], items: Mapping[str, Setting], problems: list[str]) -> Section | None:
    """The section with these settings; if a value is wrong, None, with the reasons added to `problems`."""
    try:
        return options.model_validate({key: setting.value for key, setting in items.items()})
    except ValidationError as error:
        errors = error.errors()
        # Of the types of a union, the one that the value has may still have a range.
        out_of_range = {details["loc"][0] for details in errors if details["type"] in _BOUND_ERRORS}
        for details in errors:
            key, *inner = details["loc"]
            details["input"] = redacted(details["input"], str((inner or [key])[-1]))
            setting = items[str(key)]
            if setting.flag is not None and is_union(setting.flag.type.annotation):
                if key in out_of_range and details["type"] not in _BOUND_ERRORS:
                    continue
                # pydantic reports one error per type of a union; one message for all of them is enough.
                inner, details["input"] = [], redacted(setting.value, str(key))
            # An item of a plain list is identified by its value, a key of a nested table by its path: "[1].weight".
            nested = any(isinstance(step, str) for step in inner)
            path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in inner) if nested else ""
            expected = setting.flag.type.describe() if setting.flag is not None and not inner else None
            problems.append(f"{setting.where}{path}: {explain(details, expected)}")
        return None


def _assign_options(slot: Slot, options: Mapping[str, Setting], items: dict[str, Setting], problems: list[str]) -> None:
    """Assign options from flags to the components of a slot that accepts several.

    `--SLOT.OPTION` sets an option of the only component, `--SLOT.NAME.OPTION` one of the component NAME.
    """
    default = [choice.model_dump() for choice in SECTIONS[slot.section].model_fields[slot.key].default]
    stated = items.get(slot.key) or Setting(default, f"--{slot.name}")
    choices = [{"name": one} if isinstance(one, str) else copy.deepcopy(one) for one in stated.value]
    for key, setting in options.items():
        name, dot, option = key.rpartition(".")
        chosen = [choice for choice in choices if not dot or choice.get("name") == name]
        if len(chosen) == 1:
            chosen[0][option] = setting.value
        else:
            names = ", ".join(str(choice.get("name")) for choice in choices) or "none"
            problems.append(
                f"{setting.where}: expected an option of exactly one {slot.title}, chosen: {names}. Write"
                f" --{slot.name}.NAME.OPTION, or tables [[{slot.name}]] in the run file"
            )
    items[slot.key] = replace(stated, value=choices)
