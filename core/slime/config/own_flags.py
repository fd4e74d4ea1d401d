"""slime's own flags, from the fields of `slime.config.options`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic.fields import FieldInfo

from slime.config.flags import PLUGINS, Flag, FlagTable
from slime.config.megatron_flags import megatron_flags
from slime.config.options import FILE_ONLY, SECTIONS
from slime.config.plugin_options import PluginOptions
from slime.config.sglang_flags import sglang_flags
from slime.config.unavailable import unavailable_flags
from slime.config.values import type_of
from slime.errors import did_you_mean

_SLOT_SPELLINGS = {
    "estimator": "estimator",
    "advantage-estimator": "estimator",
    "reward": "reward",
    "generator": "generator",
    "data-source": "datasource",
    "datasource": "datasource",
    "sampling-filter": "sampling_filter",
    "buffer-filter": "buffer_filter",
}
_COMPONENT_OPTION = re.compile(rf"({'|'.join(_SLOT_SPELLINGS)})\.([A-Za-z0-9_-]+)")


def flag_table() -> FlagTable:
    """Every flag of `slime train`."""
    return FlagTable(own_flags(), megatron=megatron_flags, sglang=sglang_flags)


def own_flags() -> Iterator[Flag]:
    """The flags of all sections and of `[plugins]`, with their aliases, and the unavailable ones."""
    for section, options in SECTIONS.items():
        for key, field in options.model_fields.items():
            if (section, key) in FILE_ONLY:
                continue
            yield _flag(section, key, (field.alias or key).replace("_", "-"), field)
    reward = SECTIONS["reward"].model_fields["reward"]
    yield _flag("reward", "reward", "rm-type", reward, alias_of="reward")
    for key, field in PluginOptions.model_fields.items():
        yield _flag(PLUGINS, key, f"plugins.{key}", field)
    strict = PluginOptions.model_fields["strict"]
    yield _flag(PLUGINS, "strict", "strict-plugins", strict, alias_of="plugins.strict")
    yield from unavailable_flags()


def _flag(target: str, key: str, name: str, field: FieldInfo, alias_of: str | None = None) -> Flag:
    default = field.get_default(call_default_factory=True)
    return Flag(
        name=name,
        target=target,
        key=key,
        type=type_of(field.annotation),
        help=field.description or "",
        default="" if default in (None, [], False) else str(default).lower() if default is True else str(default),
        alias_of=alias_of,
        pairs=key == "eval_prompt_data",
    )


def component_option(name: str) -> tuple[str, str] | None:
    """(slot, option) of a flag like `reward.timeout-s`; None for any other name."""
    match = _COMPONENT_OPTION.fullmatch(name)
    return None if match is None else (_SLOT_SPELLINGS[match[1]], match[2].replace("-", "_"))


def nearest_component_option(name: str) -> str:
    """` Did you mean --reward.X?` for a name like `rewrad.X`; an empty string for one that is nothing of the kind."""
    component, dot, option = name.partition(".")
    return did_you_mean(f"--{component}.{option}", [f"--{slot}.{option}" for slot in _SLOT_SPELLINGS]) if dot else ""
