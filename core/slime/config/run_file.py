"""A TOML run file to settings."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from slime.config.flag_table import find_flag, find_key, flags_of, nearest_flag
from slime.config.flags import COMPONENT, MEGATRON, SGLANG, UNAVAILABLE, Flag, Setting, Settings
from slime.config.run_config import SECTIONS
from slime.config.values import Arity
from slime.errors import ConfigError, did_you_mean
from slime.plugins.kinds import SLOTS

_TABLES = tuple(dict.fromkeys((*SECTIONS, MEGATRON, SGLANG, *SLOTS)))


def read_run_file(path: str | Path) -> Settings:
    """The settings of the run file at `path`. Raises `ConfigError` for a file that cannot be read or parsed."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"run file {path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise ConfigError(f"run file {path} cannot be read: {error.strerror}") from None
    return parse_run_file(text, str(path))


def parse_run_file(text: str, name: str) -> Settings:
    """The settings of a run file's `text`; `name` is for messages. Raises `ConfigError` for invalid TOML."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"run file {name} is not valid TOML: {error}") from None
    settings = Settings()
    for key, value in tree.items():
        table = key.replace("-", "_")
        if not isinstance(value, dict):
            # Before the first table, any flag is allowed.
            flag_name = key.replace("_", "-")
            near = nearest_flag(flag_name).replace("--", "")
            _add(settings, find_flag(flag_name), value, f"{name}: {key}", near)
        elif table not in _TABLES:
            known = [f"[{other}]" for other in _TABLES]
            settings.problems.append(
                f"{name}: unknown table [{key}].{did_you_mean(f'[{key}]', known)} Tables: {', '.join(known)}."
            )
        elif table in SLOTS and SLOTS[table].repeated:
            _add(settings, find_key(SLOTS[table].section, SLOTS[table].key), [value], f"{name}: [{key}]")
        else:
            for inner, item in value.items():
                _read_key(settings, table, inner, item, f"{name}: [{key}] {inner}")
    return settings


def _read_key(settings: Settings, table: str, key: str, value: Any, where: str) -> None:
    """Read one key of a table. In the table of a component, keys that are not slime's are the component's options."""
    flag = find_key(table, key)
    slot = SLOTS.get(table)
    if slot is not None and key in ("name", slot.key):
        flag = find_key(slot.section, slot.key)
    elif slot is not None and flag is None:
        settings.items[COMPONENT + table, key.replace("-", "_")] = Setting(value, where)
        return
    near = ""
    if flag is None:
        elsewhere = find_flag(key.replace("_", "-"))
        if elsewhere is not None and elsewhere.target == UNAVAILABLE:
            flag = elsewhere
        elif elsewhere is not None:
            near = f" It belongs in [{elsewhere.target}]."
        else:
            near = did_you_mean(key.replace("-", "_"), [flag.file_key for flag in flags_of(table)])
    _add(settings, flag, value, where, near)


def _add(settings: Settings, flag: Flag | None, value: Any, where: str, near: str = "") -> None:
    """Add the setting of `flag`, or a problem; `near` is the suggestion for an unknown key."""
    if flag is None:
        settings.problems.append(f"{where}: unknown key.{near}")
        return
    if flag.is_switch:
        if not isinstance(value, bool):
            settings.problems.append(f"{where}: got {value!r}, expected true or false")
            return
        if flag.target == UNAVAILABLE and not value:
            return
        value = flag.on == value
    if flag.type.arity is Arity.SOME and not flag.file_only and not isinstance(value, list | dict):
        value = [value]
    settings.items[flag.target, flag.key] = Setting(value, where, flag)
