"""Modules that must start fast import nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "sglang", "sglang_router", "megatron", "transformers")


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after running `code`."""
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=240)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_imports_are_light() -> None:
    modules = "slime.plugin, slime.registry, slime.utils.types, slime.data, slime.cli.main, slime.cli.plugins"
    loaded = modules_after(f"import {modules}, slime_estimators, slime_rewards, slime_datasources, slime_generators")
    assert loaded & set(HEAVY) == set()


def test_slime_plugin_imports_neither_numpy_nor_the_loader() -> None:
    loaded = modules_after("import slime.plugin")
    assert loaded & {"numpy", "importlib_metadata", "rich"} == set()


@pytest.mark.slow
def test_listing_plugins_loads_nothing_heavy() -> None:
    loaded = modules_after("from slime.cli.plugins import run; assert run(['--check']) == 0")
    assert loaded & {*HEAVY, "numpy"} == set()
    assert "slime_estimators" in loaded
