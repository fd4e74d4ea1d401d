"""Every component that comes with slime keeps the contract of its kind, with any switch set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from slime.registry.component import Component
from slime.registry.kinds import KINDS
from slime.registry.plugin_set import survey_plugins
from slime.testing.check import check_component

#: components that need a service or a model, which tests/rewards/test_contracts.py checks with real ones; and the
#: generator that needs an environment, which plugins/endpoint/tests/test_verifiers.py checks
SERVED = {"rewards/remote", "rewards/llm_judge", "rewards/reward_model", "generators/verifiers_env"}
OWN = [one for one in survey_plugins().components() if one.found.own and one.id not in SERVED]
#: required options
NEEDED: dict[str, dict[str, Any]] = {
    "generators/black_box": {"agent": "tests.support.agents:ask_once"},
    "rewards/given": {"missing": 0.0},
    # The labels of made-up samples are numbers: Python, but no comparisons.
    "rewards/code": {"python_tests": "run"},
}
#: choices that need a service
ONLINE = ({"mode": "online"},)


def switched(component: Component) -> Iterator[dict[str, Any]]:
    """The defaults, then each switch and each choice of an option that is not required separately."""
    needed = NEEDED.get(component.id, {})
    yield needed
    for name, info in component.spec.options.model_fields.items():
        if name in needed:
            continue
        if isinstance(info.default, bool):
            yield {**needed, name: not info.default}
        elif get_origin(info.annotation) is Literal:
            choices = ({name: choice} for choice in get_args(info.annotation) if choice != info.default)
            yield from ({**needed, **choice} for choice in choices if choice not in ONLINE)


CASES = [
    pytest.param(component, options, id=f"{component.id}{options or ''}")
    for component in OWN
    for options in switched(component)
]


@pytest.mark.slow
@pytest.mark.parametrize(("component", "options"), CASES)
def test_first_party_components_keep_their_contract(component: Component, options: dict[str, Any]) -> None:
    checked = check_component(component, options)
    assert checked.problems == []
    assert checked.notes == []
    assert len(checked.kept) >= 5


def test_every_kind_has_a_first_party_component() -> None:
    # The page's own panels need no plugin: its scripts draw them.
    assert {component.kind for component in OWN} == set(KINDS) - {"panel"}
