"""slime's pytest plugin: fixtures for tests of plugins, found by pytest through the entry point `slime`.

    def test_contract(slime_component):
        reward = slime_component("reward", "math/boxed", {"timeout": 5})
        assert_reward_contract(reward)

Fixtures:
    slime_context: The context of a made-up run in the test's `tmp_path`, to build a component with.
    slime_tokenizer: A small transformers tokenizer, one token a character, made without a download.
    scripted_policy: `scripted_policy([Say.text("4")])` is a policy that answers from a script.
    slime_component: `slime_component(KIND, ID, OPTIONS)` builds an installed component.

Marks:
    slime_slow: The test starts trainer ranks. `pytest -m "not slime_slow"` leaves it out.

The module stands beside the package `slime` and imports only pytest: pytest loads it in every test run of the
environment, also in those that have nothing to do with slime, and before coverage begins to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from slime.plugin import Context
    from slime.testing.scripted_policy import Call, ScriptedPolicy, Step


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks."""
    config.addinivalue_line("markers", "slime_slow: starts trainer ranks, which takes tens of seconds")


@pytest.fixture(scope="session")
def slime_tokenizer() -> Any:
    """A transformers tokenizer of single characters with a chat template. Making it takes seconds."""
    from slime.testing import make_tokenizer

    return make_tokenizer()


@pytest.fixture
def slime_context(tmp_path: Path) -> Context:
    """The context of a made-up run: seed 42, 4 samples per prompt, a prompt file, `tmp_path` as run folder."""
    from slime.testing import make_context

    return make_context(run_dir=tmp_path)


@pytest.fixture
def scripted_policy() -> Callable[[Sequence[Step] | Callable[[Call], Step]], ScriptedPolicy]:
    """`scripted_policy([Say.text("4"), EngineError("gone")])`, a `slime.plugin.PolicyClient`."""
    from slime.testing import ScriptedPolicy

    return ScriptedPolicy


@pytest.fixture
def slime_component(slime_context: Context) -> Callable[..., Any]:
    """`slime_component("reward", "math/boxed", {"limit": 5})`: an installed component, found and built as in a run.

    It raises what a run would: `PluginNotFoundError`, `PluginLoadError` or `ConfigError`.
    """
    from slime.registry.plugin_set import survey_plugins

    plugins = survey_plugins()

    def build(kind: str, name: str, options: Mapping[str, Any] | None = None) -> Any:
        return plugins.build(kind, name, options or {}, slime_context)

    return build
