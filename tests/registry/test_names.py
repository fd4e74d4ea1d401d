"""Names work bare if unique and always qualified; clashes are errors; slime's own names are reserved."""

from __future__ import annotations

from typing import Any

import pytest

from slime.config import PluginOptions
from slime.errors import ConfigError, PluginConflictError, PluginNotFoundError
from slime.registry.plugin_set import load_plugins, survey_plugins


def test_a_unique_name_is_found_bare_and_qualified(install_reward: Any) -> None:
    install_reward("math", "boxed")
    plugins = survey_plugins()
    assert plugins.find("reward", "boxed") == plugins.find("reward", "math/boxed")
    component = plugins.find("reward", "boxed")
    assert (component.found.name, component.found.distribution, component.found.version) == (
        "math",
        "slime-reward-math",
        "0.3.1",
    )
    assert component.spec.summary == "a test reward"
    assert component.origin.endswith("slime_reward_math.py:6")


def test_a_clash_is_an_error_that_prints_the_qualified_names(install_reward: Any) -> None:
    install_reward("math", "boxed")
    install_reward("rival", "boxed")
    plugins = survey_plugins()
    message = r"reward 'boxed' is ambiguous: write math/boxed \(of slime-reward-math\) or rival/boxed"
    with pytest.raises(PluginConflictError, match=message):
        plugins.find("reward", "boxed")
    assert plugins.find("reward", "rival/boxed").found.distribution == "slime-reward-rival"
    assert len(plugins.clashes()) == 1


def test_slimes_own_bare_names_cannot_be_taken(install_reward: Any) -> None:
    install_reward("mylab", "exact_match")
    plugins = survey_plugins()
    assert plugins.find("reward", "exact_match").id == "rewards/exact_match"
    assert plugins.find("reward", "mylab/exact_match").found.name == "mylab"
    assert plugins.clashes() == [
        "reward 'exact_match' means rewards/exact_match: write mylab/exact_match (of slime-reward-mylab)"
    ]


def test_strict_refuses_a_clash(install_reward: Any) -> None:
    install_reward("math", "boxed")
    install_reward("rival", "boxed")
    with pytest.raises(PluginConflictError, match="strict is on, and reward 'boxed' is ambiguous"):
        load_plugins(PluginOptions(strict=True))


def test_equal_names_in_two_kinds_do_not_clash(install: Any) -> None:
    source = """
        import slime.plugin as sp
        slime_api = 1
        @sp.hookimpl
        def slime_register_rewards():
            return [sp.RewardSpec(name="two", factory="two_kinds:R")]
        @sp.hookimpl
        def slime_register_generators():
            return [sp.GeneratorSpec(name="two", factory="two_kinds:G")]
    """
    install("slime-two", "1", {"two": "two_kinds"}, {"two_kinds": source})
    plugins = survey_plugins()
    assert plugins.find("reward", "two").kind == "reward"
    assert plugins.find("generator", "two").kind == "generator"
    assert plugins.clashes() == []


def test_an_unknown_name_offers_the_nearest_and_what_is_installed(install_reward: Any) -> None:
    install_reward("math", "boxed")
    message = (
        r"reward 'boxd' is not installed. Did you mean boxed\? Installed: exact_match, .*, boxed."
        r" They come from pip packages named slime-reward-\*"
    )
    with pytest.raises(PluginNotFoundError, match=message) as caught:
        survey_plugins().find("reward", "boxd")
    assert caught.value.exit_code == 2


def test_an_unknown_qualified_name_offers_the_nearest_qualified_one(install_reward: Any) -> None:
    install_reward("math", "boxed")
    with pytest.raises(PluginNotFoundError, match=r"Did you mean math/boxed\?"):
        survey_plugins().find("reward", "math/boxd")


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no component kind 'rewards'. Did you mean reward\?"):
        survey_plugins().find("rewards", "x")
