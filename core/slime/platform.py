"""What a device needs on which Megatron and SGLang do not run by themselves, as an installed package provides it.

Both are made for NVIDIA's GPUs. For another device, a package offers a `Platform` as an entry point of the group
`slime.platforms` that is called like the device. slime's own package `slime_cpu` does so for `cpu`.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from slime.errors import ConfigError

if TYPE_CHECKING:
    from slime.engine.server import EngineSpec

#: the entry-point group of platforms
GROUP = "slime.platforms"


class Platform:
    """What slime asks about a device. The answers here are those for GPUs, which need nothing."""

    #: whether engines may be forked from a process that has imported SGLang; a CUDA context does not survive that
    forks_engines = False

    def prepare_trainer(self) -> None:
        """Make `megatron.core` usable in this process, which has not imported it yet."""

    def prepare_engine(self) -> None:
        """Make SGLang's server usable in this process, which has not imported it yet, and in those forked from it."""

    def make_sglang_importable(self) -> None:
        """Let this process, which is no engine, import what it needs of SGLang."""

    def engine_environment(self, spec: EngineSpec) -> dict[str, str]:
        """Environment variables of an engine's process."""
        del spec
        return {}

    def engine_options(self, spec: EngineSpec) -> dict[str, str | None]:
        """SGLang's options that an engine gets unless the user sets them; None marks a switch."""
        del spec
        return {}

    def cache_tokens(self, model: Path) -> int | None:
        """Tokens that an engine's cache holds unless the user says how many; None: as many as there is room for.

        Args:
            model: The model folder.
        """
        del model
        return None


def platform_of(device: str) -> Platform:
    """The platform for a device (`cpu`, `cuda`).

    Raises:
        ConfigError: No installed package offers it.
    """
    platform = Platform() if device == "cuda" else installed_platform(device)
    if platform is None:
        raise ConfigError(
            f"this run is on a {device.upper()} (--device), which needs the platform `slime_{device}`, and no installed"
            f" package offers it (entry-point group {GROUP}, name {device}). It comes with slime: install slime-rl"
            " again, or run on GPUs with --device cuda"
        )
    return platform


@cache
def installed_platform(device: str) -> Platform | None:
    """The platform that an installed package offers for a device, or None.

    Raises:
        ConfigError: The package cannot be imported.
    """
    for entry in importlib.metadata.entry_points(group=GROUP, name=device):
        try:
            kind = entry.load()
        except ImportError as error:
            raise ConfigError(
                f"the platform `{entry.module.partition('.')[0]}`, which a run on a {device.upper()} (--device) needs,"
                f" cannot be imported: {error}. Install its package again, or run on GPUs with --device cuda"
            ) from error
        platform: Platform = kind()
        return platform
    return None
