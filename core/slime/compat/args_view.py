"""The run configuration as one flat `args` object, for users' functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, NoReturn

from slime.config.flag_table import flags_of
from slime.config.flags import MEGATRON, SGLANG
from slime.config.run_config import SECTION_OF, RunConfig
from slime.errors import ConfigError, did_you_mean

_SGLANG = "sglang_"


class ArgsView:
    """Every option as a read-only attribute.

    - slime's options: `args.rollout_batch_size`, `args.max_turns`;
    - Megatron's options: `args.hidden_size`;
    - SGLang's options, with a prefix: `args.sglang_mem_fraction_static`.

    Options of Megatron and SGLang that are not set have the package's default, or None if that is computed. Picklable.
    An unknown attribute raises an `AttributeError` with the nearest name.
    """

    __slots__ = ("_config",)
    _config: RunConfig

    def __init__(self, config: RunConfig) -> None:
        object.__setattr__(self, "_config", config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in SECTION_OF:
            return getattr(getattr(self._config, SECTION_OF[name]), name)
        stated = self._config.sglang if name.startswith(_SGLANG) else self._config.megatron
        key = name.removeprefix(_SGLANG)
        if key in stated:
            return stated[key]
        defaults = _defaults(name)
        if name in defaults:
            return _literal(defaults[name])
        near = did_you_mean(name, SECTION_OF.keys() | set(defaults))
        raise AttributeError(f"args has no {name}: no option of this run has that name.{near}")

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"args.{name} cannot be set: the configuration of a run is frozen. Keep state in an object of your own,"
            " or on Sample.metadata"
        )

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __dir__(self) -> Iterator[str]:
        yield from sorted([*SECTION_OF, *self._config.megatron, *(_SGLANG + key for key in self._config.sglang)])

    def __reduce__(self) -> tuple[type[ArgsView], tuple[RunConfig]]:
        return ArgsView, (self._config,)

    def __repr__(self) -> str:
        return f"args of run {self._config.run.run_name or 'without a name'}"


def _literal(default: str) -> Any:
    """A default as written in an engine's source; None if it is computed."""
    try:
        return ast.literal_eval(default)
    except (ValueError, SyntaxError):
        return None


def _defaults(name: str) -> dict[str, str]:
    """Attribute -> default as written in the source of Megatron or SGLang; empty if it is not installed."""
    target, prefix = (SGLANG, _SGLANG) if name.startswith(_SGLANG) else (MEGATRON, "")
    try:
        return {prefix + flag.key: flag.default for flag in flags_of(target) if flag.alias_of is None}
    except ConfigError:
        return {}
