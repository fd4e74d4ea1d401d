"""The plugin API: the current number and the one before are accepted, anything else is refused with both."""

from __future__ import annotations

from typing import Any

import pytest

from slime.registry import load
from slime.registry.plugin_set import survey_plugins


@pytest.fixture
def speaks_2_and_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a later slime, after two changes of the API."""
    monkeypatch.setattr(load, "API_VERSION", 3)
    monkeypatch.setattr(load, "ACCEPTED_APIS", (2, 3))


@pytest.mark.usefixtures("speaks_2_and_3")
@pytest.mark.parametrize("number", [2, 3])
def test_the_current_and_the_previous_version_are_accepted(install: Any, number: int) -> None:
    install("slime-x", "1", {"x": "api_module"}, {"api_module": f"slime_api = {number}\n"})
    [plugin] = [plugin for plugin in survey_plugins().plugins if plugin.found.name == "x"]
    assert plugin.api == number


@pytest.mark.usefixtures("speaks_2_and_3")
@pytest.mark.parametrize(
    ("number", "remedy"),
    [(1, "pip install -U slime-x"), (4, "a newer slime, or an older slime-x"), (True, "whole number")],
)
def test_other_versions_are_refused_with_both_numbers(install: Any, number: int, remedy: str) -> None:
    install("slime-x", "1", {"x": "api_module"}, {"api_module": f"slime_api = {number}\n"})
    [failure] = [failure for failure in survey_plugins().failures if failure.found.name == "x"]
    assert remedy in failure.advice
    if number is not True:
        assert failure.problem == f"written for plugin API {number}, this slime supports 2 and 3"


def test_the_first_version_has_no_predecessor() -> None:
    assert load.ACCEPTED_APIS == (1,)
