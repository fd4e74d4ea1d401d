"""slime's options of every reward and generator."""

from __future__ import annotations

from typing import Any

import pytest
from tests.registry.conftest import make_config as config_with

from slime.errors import ConfigError
from slime.registry.plugin_set import survey_plugins


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
