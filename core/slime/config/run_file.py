"""A TOML run file to settings."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.config.flags import MEGATRON, PLUGINS, SGLANG, UNAVAILABLE, FlagTable
from slime.config.options import FILE_ONLY, SECTIONS
from slime.config.run_config import COMPONENTS
from slime.config.settings import COMPONENT, Setting, Settings
from slime.config.values import Arity
from slime.errors import ConfigError, did_you_mean

_TABLES = (*SECTIONS, MEGATRON, SGLANG, PLUGINS, *(slot for slot in COMPONENTS if slot not in SECTIONS))


def read_run_file(path: str | Path, flags: FlagTable) -> Settings:
    """The settings of the run file at `path`.  Raises `ConfigError` for a file that cannot be read or parsed."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"run file {path} does not exist") from None
    except IsADirectoryError:
        raise ConfigError(f"run file {path} is a folder, expected a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"run file {path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise ConfigError(f"run file {path} cannot be read: {error.strerror}") from None
    return parse_run_file(text, str(path), flags)


def parse_run_file(text: str, name: str, flags: FlagTable) -> Settings:
    """The settings of a run file's `text`; `name` is for messages.  Raises `ConfigError` for broken TOML."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"run file {name} is no valid TOML: {error}") from None
    return _Reader(name, flags).read(tree)


class _Reader:
    def __init__(self, name: str, flags: FlagTable) -> None:
        self._name = name
        self._flags = flags
        self._settings = Settings()

    def read(self, tree: Mapping[str, Any]) -> Settings:
        for key, value in tree.items():
            table = key.replace("-", "_")
            if isinstance(value, dict) and table in COMPONENTS:
                self._component(table, key, value)
            elif isinstance(value, dict) and table in _TABLES:
                self._table(table, key, value)
            elif isinstance(value, dict):
                known = ", ".join(f"[{name}]" for name in _TABLES)
                near = did_you_mean(f"[{key}]", [f"[{name}]" for name in _TABLES])
                self._problem(f"{self._name}: unknown table [{key}].{near} Tables: {known}.")
            else:
                self._top_level(key, value)
        return self._settings

    def _problem(self, text: str) -> None:
        self._settings.problems.append(text)

    def _top_level(self, key: str, value: Any) -> None:
        """Any flag may stand before the first table."""
        where, name = f"{self._name}: {key}", key.replace("_", "-")
        found = self._flags.find(name)
        if found is None:
            self._problem(f"{where}: unknown key.{self._flags.nearest(name).replace('--', '')}")
        else:
            self._store(found.flag.target, key, value, where, negated=found.negated)

    def _table(self, target: str, written: str, table: Mapping[str, Any]) -> None:
        for key, value in table.items():
            where = f"{self._name}: [{written}] {key}"
            if (target, key.replace("-", "_")) in FILE_ONLY:
                self._file_only(target, key, value, where)
            elif self._flags.find_key(target, key) is not None:
                self._store(target, key, value, where)
            else:
                self._problem(f"{where}: unknown key.{self._elsewhere(target, key)}")

    def _elsewhere(self, target: str, key: str) -> str:
        """Where a key that is not in this table belongs, or the nearest that is."""
        own = next((f for f in self._flags.own() if key.replace("_", "-") in (f.name, f.key)), None)
        if own is not None and own.target != target:
            return f" It belongs in [{own.target}]."
        return did_you_mean(key.replace("-", "_"), self._flags.keys(target))

    def _component(self, slot: str, written: str, table: Mapping[str, Any]) -> None:
        """`name` chooses the component; every key that is none of slime's own is one of its options."""
        for key, value in table.items():
            where = f"{self._name}: [{written}] {key}"
            section, field = COMPONENTS[slot]
            if key == "name" or key == field:
                self._store(section, field, value, where)
            elif (slot, key.replace("-", "_")) in FILE_ONLY:
                self._file_only(slot, key, value, where)
            elif problem := _not_json(value):
                self._problem(f"{where}: {problem}")
            elif slot in SECTIONS and self._flags.find_key(slot, key) is not None:
                self._store(slot, key, value, where)
            else:
                self._settings.items.append(Setting(COMPONENT + slot, key.replace("-", "_"), value, where))

    def _file_only(self, target: str, key: str, value: Any, where: str) -> None:
        """A key that is no flag."""
        if problem := _not_json(value):
            self._problem(f"{where}: {problem}")
        else:
            self._settings.items.append(Setting(target, key.replace("-", "_"), value, where))

    def _store(self, target: str, key: str, value: Any, where: str, *, negated: bool = False) -> None:
        found = self._flags.find_key(target, key) or self._flags.find(key.replace("_", "-"))
        assert found is not None
        flag = found.flag
        if problem := _not_json(value):
            self._problem(f"{where}: {problem}")
            return
        if flag.is_switch:
            if not isinstance(value, bool):
                self._problem(f"{where}: got {value!r}, expected true or false")
                return
            value = flag.on == (value != negated)
        if flag.target == UNAVAILABLE and value is False:
            return
        if flag.type.arity is Arity.SOME and not isinstance(value, list) and not isinstance(value, dict):
            value = [value]
        self._settings.items.append(Setting(flag.target, flag.key, value, where, flag))


def _not_json(value: Any) -> str | None:
    """What is wrong with a value that TOML has and slime's options have not."""
    if isinstance(value, datetime.date | datetime.time):
        return f"got the date or time {value}, expected a text, number, true/false, list or table (quote it)"
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((problem for item in items if (problem := _not_json(item))), None)
