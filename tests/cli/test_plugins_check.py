"""`slime plugins check`: the contract kit on installed components."""

from __future__ import annotations

from typing import Any

import pytest

from slime.cli.plugins import run
from slime.errors import PluginLoadError, PluginNotFoundError

GOOD = """
    import slime.plugin as sp

    class Impl:
        def __init__(self, options, context):
            print("building")

        def score(self, samples):
            return [sp.Reward(float(len(sample.response))) for sample in samples]
"""
SHORT = GOOD.replace("for sample in samples]", "for sample in samples[1:]]")


def test_a_good_component_is_one_line(install_reward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_reward("math", "boxed", impl=GOOD)
    assert run(["check", "math/boxed"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("ok      reward math/boxed (slime-reward-math 0.3.1): ")
    assert last == "1 component checked"


def test_a_broken_rule_is_named_and_fails_the_command(install_reward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_reward("math", "boxed", impl=SHORT)
    assert run(["check", "slime-reward-math"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("broken  reward math/boxed")
    assert "returned 6 rewards for 7 samples, expected one each" in out
    assert out.endswith("1 component checked, 1 with problems\n")


def test_a_name_shared_by_component_and_plugin_selects_both(
    install_reward: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install_reward("math", "boxed", impl=GOOD)
    assert run(["check", "math"]) == 0
    first, second, _ = capsys.readouterr().out.splitlines()
    assert "reward rewards/math" in first and "reward math/boxed" in second


@pytest.mark.slow
def test_without_ids_all_components_and_broken_plugins_are_checked(
    install_reward: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install_reward("math", "boxed", impl=GOOD)
    install_reward("bad", "x", source="import sympie\n")
    assert run(["check", "--kind", "reward"]) == 1
    out = capsys.readouterr().out
    assert "ok      reward math/boxed" in out
    assert "broken  plugin bad (slime-reward-bad 0.3.1) is broken: " in out and "ModuleNotFoundError" in out


def test_a_component_of_a_broken_plugin_is_refused(install_reward: Any) -> None:
    install_reward("bad", "x", source="import sympie\n")
    with pytest.raises(PluginLoadError, match="sympie"):
        run(["check", "bad/x"])


def test_an_unknown_id_is_refused() -> None:
    with pytest.raises(PluginNotFoundError, match=r"no component or plugin is called 'exact'"):
        run(["check", "exact"])
