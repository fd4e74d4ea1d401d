"""Distributions on disk, as installed by pip, for real discovery."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

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


def make_distribution(
    site: Path,
    distribution: str,
    version: str,
    entries: dict[str, str],
    sources: dict[str, str],
    *,
    direct_url: dict[str, Any] | None = None,
    group: str = "slime",
    summary: str = "",
) -> Path:
    """Write modules and metadata of a distribution to `site`; returns its `.dist-info` folder.

    entries: entry-point name -> value.  sources: module name -> source text.
    """
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata + (f"Summary: {summary}\n" if summary else ""))
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    record = []
    for name, source in sources.items():
        text = dedent(source)
        (site / f"{name}.py").write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{name}.py,sha256={digest},{len(text)}")
    record += [f"{info.name}/entry_points.txt,,", f"{info.name}/RECORD,,"]
    (info / "RECORD").write_text("\n".join(record) + "\n")
    if direct_url is not None:
        (info / "direct_url.json").write_text(json.dumps(direct_url))
    return info


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install("slime-reward-x", "1.0", {"x": "mod"}, {"mod": source})` puts a distribution on the path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    modules: set[str] = set()

    def make(distribution: str, version: str, entries: dict[str, str], sources: dict[str, str], **more: Any) -> Path:
        info = make_distribution(site, distribution, version, entries, sources, **more)
        modules.update(sources)
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
