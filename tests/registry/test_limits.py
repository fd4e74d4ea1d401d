"""slime's options of every reward and generator."""

from __future__ import annotations

from typing import Any

import pytest
from tests.registry.conftest import IMPL
from tests.registry.conftest import make_config as config_with

from slime.errors import ConfigError
from slime.registry.plugin_set import survey_plugins

GREEDY = """
    from pydantic import Field
    import slime.plugin as sp

    slime_api = 1

    class Mine(sp.Options):
        timeout_s: float = Field(default=1.0)

    @sp.hookimpl
    def slime_register_rewards():
        return [sp.RewardSpec(name="r", factory="greedy_impl:Impl", options=Mine)]
"""


def test_limits_are_separated_from_the_components_options() -> None:
    config = config_with(options={"reward": {"ignore_case": True, "timeout_s": 5, "error_budget": 0.1}})
    resolved = survey_plugins().resolve(config)["reward"]
    assert resolved.options.model_dump()["ignore_case"] is True
    assert (resolved.limits.timeout_s, resolved.limits.error_budget) == (5.0, 0.1)


def test_limits_are_recorded() -> None:
    used = survey_plugins().provenance(config_with(options={"reward": {"timeout_s": 5}}))["used"]
    assert used["reward"]["limits"] == {"timeout_s": 5.0, "error_budget": 0.25}
    assert used["estimator"]["limits"] == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 0}, "'timeout_s' is 0"),
        ({"error_budget": 1.5}, "'error_budget' is 1.5"),
        ({"timeout": 5}, "no option 'timeout'. Did you mean timeout_s?"),
    ],
)
def test_wrong_limits_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="options of reward rewards/exact_match") as error:
        survey_plugins().resolve(config_with(options={"reward": options}))
    assert message in str(error.value)


def test_estimators_have_no_limits() -> None:
    with pytest.raises(ConfigError, match="no option 'timeout_s'"):
        survey_plugins().resolve(config_with(options={"estimator": {"timeout_s": 5}}))


def test_a_component_cannot_define_options_named_like_limits(install: Any) -> None:
    install("slime-reward-greedy", "1.0", {"greedy": "greedy"}, {"greedy": GREEDY, "greedy_impl": IMPL})
    [failure] = survey_plugins().failures
    assert failure.problem == "reward r has the option timeout_s, a name that slime uses for an option of every reward"
