"""Finding and choosing plugins: metadata only, in a fixed order, allow, deny and require."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.config import PluginOptions
from slime.errors import ConfigError, PluginLoadError, PluginNotFoundError
from slime.registry.find import find_plugins
from slime.registry.plugin_set import load_plugins, survey_plugins

OWN = [
    "datasources",
    "estimators",
    "families",
    "generators",
    "launch",
    "planner",
    "quantised",
    "rewards",
    "trackers",
    "viewer",
]


def ids(**options: Any) -> list[str]:
    return [plugin.found.name for plugin in load_plugins(PluginOptions(**options)).plugins]


@pytest.mark.row("P2")
def test_first_party_plugins_use_the_same_entry_point_group(install_reward: Any) -> None:
    install_reward("math", "boxed")
    found = find_plugins()
    assert [plugin.name for plugin in found] == [*OWN, "math"]
    assert [plugin.own for plugin in found] == [True] * len(OWN) + [False]
    assert (found[-1].distribution, found[-1].version, found[-1].entry) == (
        "slime-reward-math",
        "0.3.1",
        "slime_reward_math",
    )


def test_finding_imports_nothing(install_reward: Any) -> None:
    install_reward("math", "boxed")
    find_plugins()
    assert "slime_reward_math" not in sys.modules


def test_order_depends_on_distribution_and_name_not_on_the_path(install_reward: Any) -> None:
    for name in ("zeta", "alpha", "mid"):
        install_reward(name, "x")
    assert ids() == [*OWN, "alpha", "mid", "zeta"]


def test_entry_points_of_other_groups_are_ignored(install: Any) -> None:
    install("other", "1", {"x": "nothing"}, {}, group="slime.other")
    assert [plugin.name for plugin in find_plugins()] == OWN


def test_a_distribution_twice_on_the_path_counts_once(
    install_reward: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = install_reward("math", "boxed")
    other = tmp_path / "other" / "slime_reward_math-0.1.dist-info"
    other.mkdir(parents=True)
    for name in ("METADATA", "entry_points.txt"):
        (other / name).write_text((info / name).read_text().replace("0.3.1", "0.1"))
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    [plugin] = [plugin for plugin in find_plugins() if plugin.name == "math"]
    assert plugin.version == "0.1"  # the first on the path, which is the one that imports


def test_allow_accepts_ids_and_distributions_and_keeps_first_party_plugins(install_reward: Any) -> None:
    for name in ("a", "b", "c"):
        install_reward(name, "x")
    assert ids(allow=["a", "slime_reward.b"]) == [*OWN, "a", "b"]
    assert ids(allow=[]) == OWN


def test_deny_overrides_allow_and_first_party_plugins(install_reward: Any) -> None:
    install_reward("a", "x")
    assert ids(allow=["a"], deny=["slime-reward-a", "rewards"]) == [name for name in OWN if name != "rewards"]


def test_without_autoload_only_allowed_third_party_plugins_load(install_reward: Any) -> None:
    install_reward("a", "x")
    install_reward("b", "x")
    assert ids(autoload=False) == OWN
    assert ids(autoload=False, allow=["b"]) == [*OWN, "b"]


def test_a_plugin_that_is_not_chosen_is_not_imported(install_reward: Any) -> None:
    install_reward("a", "x")
    assert ids(deny=["a"]) == OWN
    assert "slime_reward_a" not in sys.modules


def test_allow_of_something_missing_is_an_error_with_the_nearest(install_reward: Any) -> None:
    install_reward("math", "x")
    with pytest.raises(ConfigError, match=r"allow names 'mth', which is not installed. Did you mean math\?"):
        ids(allow=["mth"])


def test_deny_of_something_missing_is_a_warning(install_reward: Any, caplog: pytest.LogCaptureFixture) -> None:
    install_reward("math", "x")
    with caplog.at_level(logging.WARNING):
        ids(deny=["mth"])
    assert "deny names 'mth', which is not installed. Did you mean math?" in caplog.text


def test_the_error_for_a_component_of_an_unloaded_plugin_gives_the_reason(install_reward: Any) -> None:
    install_reward("math", "boxed")
    plugins = load_plugins(PluginOptions(deny=["math"]))
    with pytest.raises(PluginNotFoundError, match=r"installed but not loaded: \[plugins\] deny names it"):
        plugins.find("reward", "math/boxed")


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        ("slime-reward-math>=0.4", r"require needs slime-reward-math>=0.4 \(0.3.1 is installed\). Try: pip install"),
        ("slime-reward-maths", r"require needs slime-reward-maths \(not installed\). Try: pip install"),
    ],
)
def test_an_unmet_requirement_stops_the_run(install_reward: Any, requirement: str, message: str) -> None:
    install_reward("math", "boxed")
    with pytest.raises(PluginLoadError, match=message):
        load_plugins(PluginOptions(require=[requirement]))


def test_a_met_requirement_passes(install_reward: Any) -> None:
    install_reward("math", "boxed")
    load_plugins(PluginOptions(require=["slime_reward_math>=0.3,<0.4", "slime-rl"]))


def test_a_malformed_requirement_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="require has 'x >>'"):
        load_plugins(PluginOptions(require=["x >>"]))


def test_a_survey_includes_all_plugins(install_reward: Any) -> None:
    install_reward("a", "x")
    assert [plugin.found.name for plugin in survey_plugins().plugins] == [*OWN, "a"]
