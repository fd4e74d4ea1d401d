"""A dry run without the CPU platform: refused by name on a CPU, passed on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.cli.conftest import Slime

from slime import platform


@pytest.fixture(autouse=True)
def _without_platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(platform, "GROUP", "slime.no_platforms")
    platform.installed_platform.cache_clear()
    yield
    platform.installed_platform.cache_clear()


def test_a_run_on_a_cpu_is_refused_by_name(refused: Callable[..., str]) -> None:
    message = refused()
    assert "this run is on a CPU (--device), which needs the platform `slime_cpu`" in message
    assert "install slime-rl again, or run on GPUs with --device cuda" in message


def test_a_run_on_gpus_passes_its_dry_run(dry_run: Slime) -> None:
    ended = dry_run("--device", "cuda", "--ray-address", "head:6379")
    assert ended.code == 0, ended.err
