"""Testing a plugin's module without installing it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from slime.plugin import Options
from slime.testing import (
    assert_hookimpls_valid,
    assert_light_import,
    assert_pickles,
    load_module_as_plugin,
    make_context,
)

GOOD = """
    import slime.plugin as sp

    slime_api = 1

    @sp.hookimpl
    def slime_register_rewards():
        return [sp.RewardSpec(name="one", factory="kit_good_plugin:One")]

    class One:
        def __init__(self, options, context):
            pass

        async def score(self, samples):
            return [sp.Reward(1.0) for _ in samples]
"""
MISSPELT = GOOD.replace("slime_register_rewards", "slime_register_reward")
NO_API = GOOD.replace("slime_api = 1", "")


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Modules on the path, here and in child processes."""
    sources = {"kit_good_plugin": GOOD, "kit_misspelt_plugin": MISSPELT, "kit_no_api_plugin": NO_API}
    sources |= {"kit_heavy_plugin": "import jax\n" + dedent(GOOD), "jax": "# stands for something heavy"}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    for name in sources:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("modules")
def test_a_module_is_a_plugin_without_being_installed() -> None:
    loaded = load_module_as_plugin("kit_good_plugin")
    assert [component.id for component in loaded.components] == ["kit_good_plugin/one"]
    assert type(loaded.components[0].build(Options(), make_context())).__name__ == "One"


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("module", "message"),
    [("kit_misspelt_plugin", "Did you mean slime_register_rewards"), ("kit_no_api_plugin", "slime_api = 1")],
)
def test_problems_of_a_module_are_reported(module: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_hookimpls_valid(module)


@pytest.mark.usefixtures("modules")
def test_a_heavy_import_is_named() -> None:
    assert_light_import("kit_good_plugin")
    with pytest.raises(AssertionError, match="brings in jax"):
        assert_light_import("kit_heavy_plugin")


def test_an_import_error_of_a_package_is_reported() -> None:
    with pytest.raises(AssertionError, match="No module named 'kit_nowhere'"):
        assert_light_import("kit_nowhere")


def test_importing_the_kit_is_light() -> None:
    assert_light_import("slime.testing", heavy=("torch", "numpy", "transformers", "hypothesis", "pytest", "ray"))
    assert_light_import("_slime_pytest", heavy=("slime", "pydantic", "torch", "hypothesis"))


class Plain(Options):
    limit: int = 3


def test_options_of_a_module_pickle_and_those_of_a_function_do_not() -> None:
    class Inner(Options):
        limit: int = 3

    assert_pickles(Plain(limit=4))
    with pytest.raises(AssertionError, match="top level of a module"):
        assert_pickles(Inner())
