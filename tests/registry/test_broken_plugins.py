"""Broken plugins are reported with package and remedy, and never stop the others."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from slime.config import PluginOptions
from slime.errors import PluginLoadError, PluginNotFoundError
from slime.registry.load import PluginFailure
from slime.registry.plugin_set import load_plugins, survey_plugins

HEAD = "import slime.plugin as sp\nslime_api = 1\n"
HOOK = HEAD + "@sp.hookimpl\ndef slime_register_rewards():\n    return "


def spec(**fields: str) -> str:
    values = {"name": "'r'", "factory": "'slime_reward_bad_impl:Impl'", **fields}
    return f"{HOOK}[sp.RewardSpec({', '.join(f'{name}={value}' for name, value in values.items())})]\n"


#: beside those of `broken_cases.py`, whose messages are in the documentation
BROKEN = {
    "hook without its prefix": (
        HEAD + "@sp.hookimpl\ndef register_rewards(): return []\n",
        "register_rewards() is not a hook of slime. Did you mean slime_register_rewards?",
    ),
    "argument where there is none": (
        HEAD + "@sp.hookimpl\ndef slime_register_rewards(config): return []\n",
        "has the parameter `config`, but this hook passes no arguments",
    ),
    "bad isolation": (spec(isolation="'proces'"), "isolation 'proces', expected 'process' or 'none'"),
    "bad flag": (spec(deterministic="'no'"), "deterministic 'no', expected True or False"),
    "bad timeout": (spec(timeout_s="0"), "timeout_s 0, expected a positive number of seconds"),
    "bad generator timeout": (
        HEAD
        + "@sp.hookimpl\ndef slime_register_generators():\n"
        + "    return [sp.GeneratorSpec(name='g', factory='slime_reward_bad_impl:Impl', timeout_s='60')]\n",
        "timeout_s '60', expected a positive number of seconds",
    ),
    "bad needs": (
        HEAD
        + "@sp.hookimpl\ndef slime_register_estimators():\n"
        + "    needs = frozenset({'groups'})\n"
        + "    return [sp.EstimatorSpec(name='e', factory='slime_reward_bad_impl:Impl', needs=needs)]\n",
        "estimator e needs groups, expected a set of critic, group, reference",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_reported_with_its_cause(install_reward: Any, case: str) -> None:
    source, problem = BROKEN[case]
    install_reward("bad", "r", source=source, version="1.2")
    install_reward("good", "works")
    plugins = survey_plugins()
    [failure] = plugins.failures
    assert problem in failure.problem
    assert str(failure).startswith("plugin bad (slime-reward-bad 1.2) is broken: ")
    assert "\n" not in str(failure)
    assert plugins.find("reward", "works").id == "good/works"


def failure_of(install_reward: Any) -> PluginFailure:
    install_reward("bad", "r", source="import sympie\n")
    [failure] = survey_plugins().failures
    return failure


def test_a_failure_records_package_entry_point_and_exception(install_reward: Any) -> None:
    failure = failure_of(install_reward)
    assert (failure.found.distribution, failure.found.version) == ("slime-reward-bad", "0.3.1")
    assert failure.found.entry == "slime_reward_bad"
    assert isinstance(failure.exception, ModuleNotFoundError)


def test_the_api_number_of_a_broken_plugin_is_kept(install_reward: Any) -> None:
    install_reward("bad", "r", source="slime_api = 3\n")
    assert survey_plugins().failures[0].api == 3


def test_a_broken_plugin_that_nothing_uses_is_a_warning(
    install_reward: Any, caplog: pytest.LogCaptureFixture, config: Any
) -> None:
    install_reward("bad", "r", source="import sympie\n")
    with caplog.at_level(logging.WARNING):
        plugins = load_plugins(PluginOptions())
    assert (
        "plugin bad (slime-reward-bad 0.3.1) is broken: " in caplog.text
        and "ModuleNotFoundError: No module named" in caplog.text
    )
    assert set(plugins.resolve(config)) == {"estimator", "reward", "datasource", "generator", "tracker[0]"}


def test_a_broken_plugin_that_is_used_stops_with_package_cause_and_fix(install_reward: Any, config_with: Any) -> None:
    install_reward("bad", "r", source="import sympie\n")
    plugins = load_plugins(PluginOptions())
    message = (
        r"reward bad/r comes from slime-reward-bad 0.3.1, which cannot be used: "
        r".*:1: ModuleNotFoundError: No module named 'sympie'. Install the package that provides sympie"
    )
    with pytest.raises(PluginLoadError, match=message) as caught:
        plugins.resolve(config_with(reward="bad/r"))
    assert caught.value.exit_code == 2


def test_an_unknown_bare_name_mentions_broken_plugins_it_may_belong_to(install_reward: Any) -> None:
    install_reward("bad", "r", source="import sympie\n")
    with pytest.raises(PluginNotFoundError, match=r"Perhaps it belongs to one of these: plugin bad"):
        survey_plugins().find("reward", "boxed")


def test_strict_refuses_any_broken_plugin(install_reward: Any) -> None:
    install_reward("bad", "r", source="import sympie\n")
    with pytest.raises(PluginLoadError, match=r"strict is on, and plugin bad \(slime-reward-bad 0.3.1\) is broken"):
        load_plugins(PluginOptions(strict=True))


def test_strict_accepts_a_working_installation() -> None:
    assert load_plugins(PluginOptions(strict=True)).failures == ()
