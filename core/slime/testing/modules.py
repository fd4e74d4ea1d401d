"""Tests of a plugin's module: a light import, valid hooks, and options that pickle."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

from slime.plugin import Options

if TYPE_CHECKING:
    from slime.registry.load import LoadedPlugin

#: modules that a plugin's module must not import, so that plugins are listed at once
HEAVY = (
    "torch",
    "ray",
    "sglang",
    "sglang_router",
    "megatron",
    "transformers",
    "tensorflow",
    "jax",
    "pandas",
    "sklearn",
)
_TIMEOUT_S = 60.0


def assert_light_import(package: str, *, heavy: Iterable[str] = HEAVY) -> None:
    """Raise `AssertionError` with the heavy modules that `import package` loads in a fresh interpreter."""
    script = f"import json, sys\nimport {package}\nprint(json.dumps(sorted({{n.split('.')[0] for n in sys.modules}})))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise AssertionError(f"import {package} took longer than {_TIMEOUT_S:g} s; expected well under one") from None
    if done.returncode:
        raise AssertionError(f"import {package} failed in a fresh interpreter:\n{done.stderr.strip()}")
    found = set(json.loads(done.stdout.splitlines()[-1])) & set(heavy)
    if found:
        raise AssertionError(
            f"import {package} brings in {', '.join(sorted(found))}; expected none of them: keep hooks and options in"
            " the module that the entry point names, and the work in the one that `factory` names"
        )


def load_module_as_plugin(module: ModuleType | str) -> LoadedPlugin:
    """Load a module as slime loads an installed plugin, with its components, without installing it.

    The plugin's id is the last part of the module's name.

    Raises:
        AssertionError: Something is wrong with the plugin.
    """
    import importlib_metadata
    import pluggy

    from slime.plugin import hooks as hookspecs
    from slime.registry.find import GROUP, FoundPlugin
    from slime.registry.load import load_each

    name = module if isinstance(module, str) else module.__name__
    sys.modules.setdefault(name, module if isinstance(module, ModuleType) else importlib.import_module(name))
    plugin = name.rpartition(".")[2]
    entry = importlib_metadata.EntryPoint(plugin, name, GROUP)
    manager = pluggy.PluginManager("slime")
    manager.add_hookspecs(hookspecs)
    loaded, failures = load_each([FoundPlugin(plugin, name, name, "0", entry)], manager)
    if failures:
        raise AssertionError(f"{name} is no working plugin: {failures[0].problem}") from failures[0].exception
    return loaded[0]


def assert_hookimpls_valid(module: ModuleType | str) -> None:
    """Raise `AssertionError` for a misspelt hook, a wrong signature, an invalid spec or a wrong `slime_api`.

    The class that a `factory` names is not imported.
    """
    load_module_as_plugin(module)


def assert_pickles(options: Options) -> None:
    """Raise `AssertionError` unless `options` survive pickling, as they must to reach the processes of a run."""
    try:
        again = pickle.loads(pickle.dumps(options))
    except Exception as error:
        raise AssertionError(
            f"{type(options).__name__} cannot be pickled: {type(error).__name__}: {error}; expected plain values, in a"
            " class at the top level of a module"
        ) from error
    if again != options:
        raise AssertionError(f"{options!r} became {again!r} by pickling; expected no change")
