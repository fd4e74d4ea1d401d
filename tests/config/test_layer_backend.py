"""Which layers a run gets that states none, and what its configuration says of them."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.config import RunConfig
from slime.config.defaults import resolve
from slime.config.layer_backend import missing_for
from slime.config.run_config import SECTIONS

ALL = "transformer_engine triton slime_fused"
#: packages, options of slime and of Megatron -> layers
CHOICES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (ALL, {"device": "cuda"}, {}, "te"),
    ("triton slime_fused", {"device": "cuda"}, {}, "torch"),
    (ALL, {"device": "cpu"}, {}, "torch"),
    (ALL, {"device": "cuda", "lora_rank": 8}, {}, "torch"),
    (ALL, {"device": "cuda", "deterministic": True}, {}, "te"),
    (ALL, {"device": "cuda"}, {"transformer_impl": "local"}, "torch"),
    ("triton slime_fused", {"device": "cuda"}, {"transformer_impl": "transformer_engine"}, "te"),
    (ALL, {"device": "cuda", "layer_backend": "fused"}, {}, "fused"),
    ("slime_fused", {"device": "cpu", "layer_backend": "fused"}, {}, "fused"),
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes it look as if these of the packages were installed, and no others."""

    def install(packages: str) -> None:
        found = {name: SimpleNamespace() for name in packages.split()}
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: found.get(name))

    return install


@pytest.mark.parametrize(("packages", "options", "megatron", "expected"), CHOICES)
def test_layers_follow_from_packages_device_and_options(
    packages: str, options: dict[str, Any], megatron: dict[str, Any], expected: str, installed: Callable[[str], None]
) -> None:
    installed(packages)
    sections = {
        name: kind(**{key: value for key, value in options.items() if key in kind.model_fields})
        for name, kind in SECTIONS.items()
    }
    config = resolve(RunConfig(megatron=megatron, **sections))
    assert config.cluster.layer_backend == config.layer_backend == expected
    assert f'layer_backend = "{expected}"' in config.to_toml()
    assert config.names_layers == ((options["device"], expected) != ("cpu", "torch"))


@pytest.mark.parametrize(
    ("on_gpu", "environment", "present", "said"),
    [
        (False, {}, "g++", None),
        (False, {}, "gcc", "needs a compiler, and g++ is not found"),
        (False, {"CXX": "/opt/c++ -m64"}, "/opt/c++", None),
        (False, {"CXX": "clang++"}, "g++", "needs a compiler, and clang++ is not found"),
        (True, {}, "clang", None),
        (True, {}, "", "needs a compiler, and gcc or clang is not found"),
    ],
)
def test_fused_layers_need_a_compiler(
    on_gpu: bool,
    environment: dict[str, str],
    present: str,
    said: str | None,
    installed: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed("triton slime_fused")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == present else None)
    found = missing_for("fused", on_gpu=on_gpu)
    assert (found is None) == (said is None)
    assert said is None or said in str(found)


def test_fused_layers_need_pythons_headers(
    installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed("triton slime_fused")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert f"needs Python's headers, and {tmp_path} has none" in str(missing_for("fused", on_gpu=True))
    (tmp_path / "Python.h").touch()
    assert missing_for("fused", on_gpu=True) is None


@pytest.mark.parametrize(
    ("layers", "present", "said"),
    [
        ("te", "", "needs the package transformer_engine, which is not installed. Drop it, or build"),
        ("fused", "triton", "needs the package slime_fused"),
        ("fused", "slime_fused", "needs the package triton, which PyTorch for GPUs"),
    ],
)
def test_a_missing_package_is_named(layers: str, present: str, said: str, installed: Callable[[str], None]) -> None:
    installed(present)
    assert said in str(missing_for(layers, on_gpu=True))
