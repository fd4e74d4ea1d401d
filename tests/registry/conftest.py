"""Installed distributions (`install`, `install_reward`), and runs that name their components."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.distributions import IMPL, REWARD, Install, install, install_reward

from slime.compat import probe
from slime.config import RunConfig
from slime.config.options import AlgorithmOptions, RewardOptions, RolloutOptions
from slime.errors import PluginLoadError
from slime.plugin import Context
from slime.registry.function_path import Reference

__all__ = ["IMPL", "REWARD", "Install", "install", "install_reward"]


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """A context without a configuration."""
    return Context(seed=0, run_dir=tmp_path, logger=logging.getLogger("test"))


@pytest.fixture
def config() -> RunConfig:
    """A run with slime's own plugins."""
    return make_config()


@pytest.fixture
def probed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file defines is found out in this process, which runs the file anyway, and not in one that is started."""

    def imported(reference: Reference) -> probe.ProbedFile:
        found = probe._import(str(reference.file or reference.module))
        if isinstance(found, PluginLoadError):
            raise found
        return found

    monkeypatch.setattr(probe, "_probed", imported)


def make_config(
    *,
    estimator: str | None = "grpo",
    reward: str | None = "exact_match",
    generator: str | None = None,
    samples: int = 4,
    options: dict[str, dict[str, Any]] | None = None,
    **algorithm: Any,
) -> RunConfig:
    return RunConfig(
        algorithm=AlgorithmOptions(advantage_estimator=estimator, **algorithm),
        reward=RewardOptions(reward=reward),
        rollout=RolloutOptions(n_samples_per_prompt=samples, generator=generator),
        component_options=options or {},
    )


@pytest.fixture
def config_with() -> Callable[..., RunConfig]:
    """`config_with(reward="math/boxed", samples=2)`."""
    return make_config
