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


BROKEN = {
    "missing module": ("import sympie\n", "No module named 'sympie'", "package that provides sympie"),
    "syntax error": ("def (:\n", "SyntaxError", "pip install -U slime-reward-bad"),
    "raises": ("raise RuntimeError('no licence')\n", "RuntimeError: no licence", "tell its authors"),
    "exits": ("import sys\nsys.exit(3)\n", "SystemExit: 3", "tell its authors"),
    "no api": ("import slime.plugin\n", "has slime_api = None", "tell its authors"),
    "newer api": ("slime_api = 3\n", "written for plugin API 3, this slime supports 1", "pip install -U slime-rl"),
    "older api": (
        "slime_api = 0\n",
        "written for plugin API 0, this slime supports 1",
        "pip install -U slime-reward-bad",
    ),
    "odd api": ("slime_api = '1'\n", "slime_api = '1', expected a whole number", ""),
    "misspelt hook": (
        HEAD + "@sp.hookimpl\ndef slime_register_reward(): return []\n",
        "slime_register_reward() is not a hook of slime. Did you mean slime_register_rewards?",
        "",
    ),
    "hook without its prefix": (
        HEAD + "@sp.hookimpl\ndef register_rewards(): return []\n",
        "register_rewards() is not a hook of slime. Did you mean slime_register_rewards?",
        "",
    ),
    "unmarked hook": (
        HEAD + "def slime_register_rewards(): return []\n",
        "is not marked with @slime.plugin.hookimpl",
        "",
    ),
    "wrong argument": (
        HEAD + "@sp.hookimpl\ndef slime_step_finished(stp): pass\n",
        "has the parameter `stp`, but this hook passes only step, metrics. Did you mean step?",
        "",
    ),
    "argument where there is none": (
        HEAD + "@sp.hookimpl\ndef slime_register_rewards(config): return []\n",
        "has the parameter `config`, but this hook passes no arguments",
        "",
    ),
    "keyword-only argument": (
        HEAD + "@sp.hookimpl\ndef slime_step_finished(*, step): pass\n",
        "has the parameter `step`, expected plain parameters without defaults",
        "",
    ),
    "async hook": (
        HEAD + "@sp.hookimpl\nasync def slime_register_rewards(): return []\n",
        "is a coroutine or generator",
        "",
    ),
    "wrapper": (
        HEAD + "@sp.hookimpl(wrapper=True)\ndef slime_register_rewards():\n    return (yield)\n",
        "is a hook wrapper",
        "",
    ),
    "hook raises": (HOOK + "1 / 0\n", "ZeroDivisionError: division by zero", ""),
    "hook returns no list": (HOOK + "None\n", "returned a NoneType, expected a list of RewardSpec", ""),
    "list of something else": (HOOK + "['r']\n", "returned a str in its list, expected RewardSpec", ""),
    "spec of another kind": (
        HOOK + "[sp.EstimatorSpec(name='e', factory='slime_reward_bad_impl:Impl')]\n",
        "returned a EstimatorSpec in its list, expected RewardSpec",
        "",
    ),
    "unknown spec field": (spec(timeout="5"), "TypeError: RewardSpec.__init__() got an unexpected keyword", ""),
    "bad name": (spec(name="'Big Name'"), "reward name 'Big Name' is not made of lower-case letters", ""),
    "bad factory": (spec(factory="'Impl'"), "factory 'Impl', expected \"package.module:Class\"", ""),
    "missing factory module": (spec(factory="'no.where:Impl'"), "there is no module no.where", ""),
    "bad options": (spec(options="dict"), "expected a subclass of slime.plugin.Options", ""),
    "bad isolation": (spec(isolation="'proces'"), "isolation 'proces', expected 'process' or 'none'", ""),
    "bad flag": (spec(deterministic="'no'"), "deterministic 'no', expected True or False", ""),
    "bad scope": (spec(scope="'batch'"), "scope 'batch', expected 'sample' or 'group'", ""),
    "bad timeout": (spec(timeout_s="0"), "timeout_s 0, expected a positive number of seconds", ""),
    "bad generator timeout": (
        HEAD
        + "@sp.hookimpl\ndef slime_register_generators():\n"
        + "    return [sp.GeneratorSpec(name='g', factory='slime_reward_bad_impl:Impl', timeout_s='60')]\n",
        "timeout_s '60', expected a positive number of seconds",
        "",
    ),
    "bad needs": (
        HEAD
        + "@sp.hookimpl\ndef slime_register_estimators():\n"
        + "    needs = frozenset({'groups'})\n"
        + "    return [sp.EstimatorSpec(name='e', factory='slime_reward_bad_impl:Impl', needs=needs)]\n",
        "estimator e needs groups, expected a set of critic, group, reference",
        "",
    ),
    "same name twice": (
        HOOK + "[sp.RewardSpec(name='r', factory='slime_reward_bad_impl:Impl')] * 2\n",
        "registers 'r' twice",
        "",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_reported_with_cause_and_remedy(install_reward: Any, case: str) -> None:
    source, problem, remedy = BROKEN[case]
    install_reward("bad", "r", source=source, version="1.2")
    install_reward("good", "works")
    plugins = survey_plugins()
    [failure] = plugins.failures
    assert problem in failure.problem
    assert remedy in failure.remedy
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


def test_an_entry_point_must_name_a_module(install: Any) -> None:
    install("slime-reward-cls", "1", {"cls": "slime_reward_cls:Plugin"}, {"slime_reward_cls": "class Plugin: pass\n"})
    [failure] = survey_plugins().failures
    assert "names a type, expected a module" in failure.problem


def test_a_plugin_id_must_be_readable(install: Any) -> None:
    install("slime-reward-odd", "1", {"Odd.Id": "slime_reward_odd"}, {"slime_reward_odd": "slime_api = 1\n"})
    [failure] = survey_plugins().failures
    assert "its id 'Odd.Id' is not made of" in failure.problem


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
