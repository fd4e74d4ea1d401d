"""What a component requires beyond its package's own dependencies."""

from __future__ import annotations

from typing import Any

import pytest

from slime.errors import PluginLoadError
from slime.registry.plugin_set import survey_plugins

SOURCE = """
    import slime.plugin as sp

    slime_api = 1

    @sp.hookimpl
    def slime_register_rewards():
        return [sp.RewardSpec(name="boxed", factory="slime_reward_math_impl:Impl", requires=({requires},))]
"""


def resolve(install_reward: Any, config_with: Any, requires: str) -> Any:
    install_reward("math", "boxed", source=SOURCE.format(requires=requires))
    return survey_plugins().resolve(config_with(reward="boxed"))


@pytest.mark.parametrize(
    "requires", ["'pluggy'", "'pluggy>=1,<2', 'pydantic'", "'sympie; python_version<\"3\"'", "'Pluggy[extra]>=1'"]
)
def test_a_run_with_a_met_requirement_starts(install_reward: Any, config_with: Any, requires: str) -> None:
    assert "reward" in resolve(install_reward, config_with, requires)


def test_a_run_with_an_unmet_requirement_is_refused_with_the_pip_command(install_reward: Any, config_with: Any) -> None:
    message = (
        r"reward math/boxed \(slime-reward-math 0.3.1\) needs sympie>=1.12 \(not installed\) and pluggy<1"
        r" \(1\.\d+\.\d+ is installed\)\. Try: pip install \"sympie>=1.12\" \"pluggy<1\""
    )
    with pytest.raises(PluginLoadError, match=message):
        resolve(install_reward, config_with, "'sympie>=1.12', 'pluggy<1', 'pydantic'")


def test_a_single_string_is_not_a_list_of_requirements(install_reward: Any) -> None:
    install_reward("math", "boxed", source=SOURCE.format(requires="").replace("(,)", "'pluggy'"))
    assert "expected a tuple of PEP 508 requirements" in survey_plugins().failures[0].problem
