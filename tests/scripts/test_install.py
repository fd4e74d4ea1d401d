"""`make install`: what it checks first, and the locked packages."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from scripts.install_checks import problems

ROOT = Path(__file__).parents[2]
GOOD: Mapping[str, Any] = {
    "python": (3, 11),
    "system": "Linux",
    "machine": "x86_64",
    "glibc": "2.36",
    "free_gb": 100.0,
    "driver": "580.65.06",
}


def pins(name: str) -> dict[str, str]:
    """The versions in one file of `requirements/`."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    return {canonicalize_name(found[1]): found[2] for found in re.finditer(r"^([\w.-]+)==([^\s;]+)", text, re.M)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("change", [{}, {"python": (3, 12)}, {"driver": ""}, {"glibc": "2.34"}, {"driver": "595.10"}])
def test_a_machine_that_has_everything_has_no_problem(device: str, change: dict[str, Any]) -> None:
    assert problems(device, **(GOOD | change)) == []


@pytest.mark.parametrize(
    ("device", "change", "says"),
    [
        ("cpu", {"python": (3, 10)}, "Python 3.10: slime needs 3.11 or 3.12"),
        ("cpu", {"python": (3, 13)}, "make install PYTHON=python3.11"),
        ("cpu", {"system": "Darwin", "glibc": ""}, "Darwin: slime needs Linux"),
        ("cuda", {"machine": "aarch64"}, "processor aarch64"),
        ("cuda", {"glibc": "2.31"}, "glibc 2.31: the packages need 2.34 or later"),
        ("cuda", {"glibc": "2.4"}, "glibc 2.4:"),  # older than 2.34, though not as text
        ("cpu", {"glibc": "2.17"}, "need 2.28 or later"),
        ("cpu", {"glibc": ""}, "musl"),
        ("cuda", {"free_gb": 9.0}, "9.0 GB of free space: pip needs"),
        ("cuda", {"driver": "535.183.01"}, "NVIDIA driver 535.183.01: PyTorch's packages are built for CUDA 13"),
    ],
)
def test_what_is_missing_is_named_with_the_remedy(device: str, change: dict[str, Any], says: str) -> None:
    (problem,) = problems(device, **(GOOD | change))
    assert says in problem


def test_every_problem_is_named_at_once() -> None:
    assert len(problems("cuda", **(GOOD | {"python": (3, 9), "glibc": "2.31", "driver": "470.1", "free_gb": 1.0}))) == 4


def test_a_device_that_is_unknown_or_differs_from_the_installed_one_is_refused(tmp_path: Path) -> None:
    def make(*words: str) -> str:
        done = subprocess.run(
            ["make", "-C", str(ROOT), f"VENV={tmp_path / 'venv'}", "install", *words],
            capture_output=True,
            check=False,
            text=True,
            timeout=60,
        )
        assert done.returncode
        return done.stderr

    assert "DEVICE=tpu: expected cpu or cuda" in make("DEVICE=tpu")
    assert not (tmp_path / "venv").exists()
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".installed-cpu").touch()
    assert "holds the packages for another device: make clean" in make("DEVICE=cuda")


def test_the_locked_packages_for_gpus_are_what_slime_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    locked = pins("gpu.txt")
    for text in [*project["dependencies"], *project["optional-dependencies"]["gpu"]]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), f"{text}: make lock-gpu"


def test_the_locked_packages_for_gpus_are_those_that_the_tests_run_with() -> None:
    locked, tested = pins("gpu.txt"), pins("cpu.txt") | pins("dev.txt")
    differing = {name for name in locked.keys() & tested.keys() if locked[name] != tested[name]}
    # torch: SGLang's kernels are built for another release than the CPU build here. The others: SGLang's metadata.
    assert differing == {"torch", "numpy", "python-dateutil"}
    # Both sets are installed with dev.txt beside them, and nothing else.
    assert pins("cpu.txt").keys() < locked.keys()


def test_each_locked_package_for_gpus_has_hashes() -> None:
    text = (ROOT / "requirements" / "gpu.txt").read_text(encoding="utf-8")
    blocks = re.split(r"^(?=[\w.-]+==)", text, flags=re.M)[1:]
    assert len(blocks) > 200
    assert all("--hash=sha256:" in block for block in blocks)


def test_locked_packages_install_on_debian_12s_python() -> None:
    """It is 3.11.2; some packages want a later patch release. Read from those that are installed as they are locked."""
    wants = {}
    for file in ("cpu.txt", "dev.txt", "docs.txt"):
        for name, version in pins(file).items():
            found = next(iter(importlib.metadata.distributions(name=name)), None)
            if found is not None and found.version == version:
                wants[name] = found.metadata.get("Requires-Python") or ">=3"
    assert len(wants) > 100
    assert {name: text for name, text in wants.items() if not SpecifierSet(text).contains("3.11.2")} == {}


@pytest.mark.slow
def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    declared = {re.split(r"[\[<>=~! ]", one)[0].replace("-", "_") for one in wanted}
    # Named otherwise than their modules, or parts of the interface of a package that is declared.
    declared |= {"mlflow"} if "mlflow_skinny" in declared else set()
    belongs = {"yaml": "pyyaml", "grpc": "grpcio", "megatron": "megatron_core", "yarl": "aiohttp"}
    belongs |= {"referencing": "jsonschema", "huggingface_hub": "transformers", "typing_extensions": "pydantic"}
    # What a run can do without, and whose absence has a message of its own
    absent = {"flash_attn", "transformer_engine", "verifiers", "openai"}
    own = {"slime", *(folder.name for folder in ROOT.glob("plugins/*/slime_*"))}
    files = [*(ROOT / "core").rglob("*.py"), *ROOT.glob("plugins/*/slime_*/**/*.py")]
    imported = {
        name.split(".")[0]: file.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    others = {name: file for name, file in imported.items() if name not in {*sys.stdlib_module_names, *own, *absent}}
    assert {name: file for name, file in others.items() if belongs.get(name, name) not in declared} == {}
