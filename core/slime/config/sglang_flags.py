"""SGLang's server options behind `--sglang-`, and their way to the server's command line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from slime.config.flags import SGLANG, Flag
from slime.config.sglang_fields import SGLangOption, sglang_options
from slime.config.values import Arity
from slime.errors import ConfigError, did_you_mean

#: options slime decides, and what a user states instead
RESERVED: dict[str, str] = {
    "model_path": "state --hf-checkpoint",
    "host": "engines listen where slime can reach them",
    "port": "state --engine-port, the port of the first engine",
    "nccl_port": "slime picks free ports",
    "device": "state --device",
    "base_gpu_id": "slime places the engines",
    "gpu_id_step": "slime places the engines",
    "dist_init_addr": "slime places the engines",
    "nnodes": "slime places the engines; an engine runs on one node",
    "node_rank": "slime places the engines; an engine runs on one node",
    "use_ray": "slime starts the engines",
    "config": "use the [sglang] table of the run file",
}


def sglang_flags() -> Iterator[Flag]:
    """Every SGLang flag.  Raises `ConfigError` when SGLang is not installed."""
    for option in sglang_options().values():
        names = [name.lstrip("-") for name in (option.flag, *option.aliases)]
        field_name = option.key.replace("_", "-")
        if field_name not in names:
            names.append(field_name)
        for name in names:
            yield Flag(
                name=f"sglang-{name}",
                target=SGLANG,
                key=option.key,
                type=option.type,
                help=option.help,
                default=option.default,
                alias_of=None if name == names[0] else f"sglang-{names[0]}",
            )


def sglang_argv(values: Mapping[str, Any]) -> list[str]:
    """`RunConfig.sglang` as words of SGLang's own command line.

    Raises `ConfigError` for a name SGLang does not have, and for a switch that cannot be turned off.
    """
    if not values:
        return []
    options = sglang_options()
    words: list[str] = []
    for key, value in values.items():
        if key not in options:
            raise ConfigError(f"SGLang has no option {key!r}.{did_you_mean(key, options)}")
        words += _words(options[key], value)
    return words


def _words(option: SGLangOption, value: Any) -> list[str]:
    if option.type.arity is Arity.SWITCH:
        if value:
            return [option.flag]
        if option.negatable:
            return [f"--no-{option.flag.removeprefix('--')}"]
        if option.default == "True":
            raise ConfigError(
                f"--sglang-{option.flag.removeprefix('--')} cannot be turned off: SGLang has no flag for it."
            )
        return []
    if option.type.arity in (Arity.SOME, Arity.ANY):
        return [option.flag, *map(_word, value)]
    if option.type.arity is Arity.MAYBE and value == "":
        return [option.flag]
    word = _word(value)
    return [f"{option.flag}={word}"] if word.startswith("-") else [option.flag, word]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
