"""Distributions made on disk, as pip would leave them, so that discovery runs for real."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from slime.config import RunConfig
from slime.config.options import AlgorithmOptions, RewardOptions, RolloutOptions
from slime.plugin import Context

Install = Callable[..., Path]

REWARD = """
    import slime.plugin as sp

    slime_api = 1

    @sp.hookimpl
    def slime_register_rewards():
        return [sp.RewardSpec(name="{name}", factory="{module}_impl:Impl", summary="a test reward")]
"""
IMPL = """
    class Impl:
        def __init__(self, options, context):
            self.options, self.context = options, context

        async def score(self, samples):
            return []
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install("slime-reward-x", "1.0", {"x": "mod"}, {"mod": source})` puts a distribution on the path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    modules: set[str] = set()

    def make(
        distribution: str,
        version: str,
        entries: dict[str, str],
        sources: dict[str, str],
        *,
        direct_url: dict[str, Any] | None = None,
        group: str = "slime",
    ) -> Path:
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        record = [f"{name}.py,sha256={len(source):064d},{len(source)}" for name, source in sources.items()]
        (info / "RECORD").write_text("\n".join([*record, f"{info.name}/RECORD,,"]) + "\n")
        if direct_url is not None:
            (info / "direct_url.json").write_text(json.dumps(direct_url))
        for name, source in sources.items():
            (site / f"{name}.py").write_text(dedent(source))
            modules.add(name)
        importlib.invalidate_caches()
        return info

    yield make
    for name in modules:
        sys.modules.pop(name, None)


@pytest.fixture
def install_reward(install: Install) -> Install:
    """`install_reward("math", "boxed")`: a working package slime-reward-math with the reward math/boxed."""

    def make(
        plugin: str, name: str, *, version: str = "0.3.1", source: str = REWARD, impl: str = IMPL, **more: Any
    ) -> Path:
        module = f"slime_reward_{plugin}"
        sources = {
            module: source.format(name=name, module=module) if source is REWARD else source,
            f"{module}_impl": impl,
        }
        return install(f"slime-reward-{plugin}", version, {plugin: module}, sources, **more)

    return make


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """A context without a configuration."""
    return Context(seed=0, run_dir=tmp_path, logger=logging.getLogger("test"))


@pytest.fixture
def config() -> RunConfig:
    """A run with slime's own plugins."""
    return make_config()


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
