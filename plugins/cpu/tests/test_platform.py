"""Without the platform, runs on a CPU are refused by name before anything starts; those on GPUs need none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime import platform
from slime.engine.server import EngineSpec, server_arguments, server_environment
from slime.errors import ConfigError, EngineStartError
from slime.platform import Platform, installed_platform, platform_of
from slime_cpu.platform import CpuPlatform
from slime_cpu.sglang_patches import Patch


def test_the_installed_platform_is_found() -> None:
    assert isinstance(platform_of("cpu"), CpuPlatform)
    assert type(platform_of("cuda")) is Platform


@pytest.fixture
def without_platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No installed package offers any."""
    monkeypatch.setattr(platform, "GROUP", "slime.no_platforms")
    installed_platform.cache_clear()
    yield
    installed_platform.cache_clear()


@pytest.mark.usefixtures("without_platform")
def test_without_it_a_device_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"this run is on a CPU .* needs the platform `slime_cpu`, and no installed"):
        platform_of("cpu")


@pytest.mark.parametrize("flags", [("--enable-dp-attention", "--dp-size", "2"), ("--attn-dp-size", "2")])
def test_ranks_that_wait_for_one_another_do_not_sleep(flags: tuple[str, ...]) -> None:
    alone = EngineSpec("model", Path("log"), device="cpu", tp_size=2)
    together = EngineSpec("model", Path("log"), device="cpu", tp_size=2, extra_args=flags)
    assert "--sleep-on-idle" in server_arguments(alone, 1)
    assert "--sleep-on-idle" not in server_arguments(together, 1)


@pytest.mark.usefixtures("without_platform")
def test_an_engine_on_gpus_asks_for_no_platform() -> None:
    spec = EngineSpec("model", Path("log"), device="cuda")
    assert server_arguments(spec, 1) and server_environment(spec)


def test_a_platform_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "slime_cpu.platform", None)
    installed_platform.cache_clear()
    with pytest.raises(ConfigError, match=r"the platform `slime_cpu`.* cannot be imported: .*slime_cpu\.platform"):
        platform_of("cpu")
    installed_platform.cache_clear()


def test_a_function_that_this_sglang_lacks_is_named() -> None:
    with pytest.raises(EngineStartError, match=r"multiprocessing:no_such does not exist .* because of a reason"):
        Patch("multiprocessing:no_such", lambda original: original, "of a reason").apply()
