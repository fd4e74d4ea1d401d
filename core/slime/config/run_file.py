"""A TOML run file to settings."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from slime.config.flag_table import find_flag, find_key, flags_of, nearest_flag
from slime.config.flags import COMPONENT, MEGATRON, SGLANG, UNAVAILABLE, Flag, Setting, Settings
from slime.config.run_config import SECTIONS, RunConfig
from slime.config.value_types import Arity, check_path, unusable
from slime.errors import ConfigError, did_you_mean
from slime.registry.kinds import SLOTS

_TABLES = tuple(dict.fromkeys((*SECTIONS, MEGATRON, SGLANG, *SLOTS)))


def read_run_file(path: str | Path) -> Settings:
    """The settings of the run file at `path`. Raises `ConfigError` for a file that cannot be read or parsed."""
    if (wrong := unusable(str(path))) is not None:
        raise ConfigError(f"the name of the run file{wrong}")
    try:
        check_path(str(path))
    except ValueError as error:
        raise ConfigError(f"run file {path}: {error}") from None
    try:
        # Reading a pipe would wait until something is written to it.
        if not stat.S_ISREG(mode := os.stat(path).st_mode) and not stat.S_ISDIR(mode):
            raise ConfigError(f"run file {path} is not a file, but a pipe, a device or a socket")
        # Some editors begin UTF-8 files with a byte-order mark.
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"run file {path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise ConfigError(f"run file {path} cannot be read: {error.strerror}") from None
    return parse_run_file(text, str(path))


def parse_run_file(text: str, name: str) -> Settings:
    """The settings of a run file's `text`; `name` is for messages. Raises `ConfigError` for invalid TOML."""
    try:
        tree = tomllib.loads(text)
    except ValueError as error:  # a whole number of thousands of digits is one, and no TOMLDecodeError
        raise ConfigError(f"run file {name} is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"run file {name}: lists or tables are nested too deeply to be read") from None
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
        _store(settings, (COMPONENT + table, key.replace("-", "_")), Setting(value, where))
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
        value = flag.on == value
    if flag.type.arity is Arity.SOME and not flag.file_only and not isinstance(value, list | dict):
        value = [value]
    _store(settings, (flag.target, flag.key), Setting(value, where, flag))


def _store(settings: Settings, option: tuple[str, str], setting: Setting) -> None:
    """Store a setting. A file that sets an option twice, in two spellings, is a mistake: neither value is the right one
    for sure."""
    first = settings.items.setdefault(option, setting)
    if first is not setting:
        settings.problems.append(f"{setting.where} sets the same option as {first.where}. Keep one of them")


#: the options that name files or folders, by section; `evaluation` has some in lists
PATHS: dict[str, tuple[str, ...]] = {
    "run": ("output_dir",),
    "cluster": ("rollout_external_engine_keys",),
    "data": ("prompt_data",),
    "algorithm": ("critic_load",),
    "checkpoint": ("hf_checkpoint", "initial_megatron_checkpoint", "ref_load", "save", "load", "save_hf"),
    "lora": ("lora_load",),
}


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The configuration with the paths of its own options made absolute, so that it works from any folder."""
    for section, keys in PATHS.items():
        stated = {key: getattr(getattr(config, section), key) for key in keys}
        config = config.with_options(section, **{key: _absolute(value) for key, value in stated.items() if value})
    evaluation = config.evaluation
    return config.with_options(
        "evaluation",
        eval_prompt_data=[(name, _absolute(path)) for name, path in evaluation.eval_prompt_data],
        sets=[one.model_copy(update={"path": _absolute(one.path)}) for one in evaluation.sets],
    )


def _absolute(path: Any) -> Any:
    """A path, or a list of paths; addresses such as `hf://NAME` stay as they are."""
    if isinstance(path, list):
        return [_absolute(one) for one in path]
    return path if "://" in path else os.path.abspath(path)
