"""The family of a model is found by its `model_type`, among those of all installed plugins, or is named by the run."""

from __future__ import annotations

from typing import Any

import pytest

from slime.config import RunConfig
from slime.config.weight_options import CheckpointOptions
from slime.errors import ConfigError, PluginNotFoundError
from slime.registry.plugin_set import survey_plugins
from slime.testing.check import check_component
from slime.weights.models import Models
from slime_families.examples import example

LIGHT = """
    import slime.plugin as sp
    slime_api = 1

    @sp.hookimpl
    def slime_register_families():
        return [
            sp.FamilySpec(
                name="pebble",
                factory="pebble_impl:Pebble",
                model_types=("pebble", "boulder"),
                causal_lm="PebbleForCausalLM",
            )
        ]
"""
IMPL = """
    from slime.plugin import Architecture

    class Pebble:
        def __init__(self, options, context):
            pass

        def describe(self, config):
            return Architecture("pebble", {"num_layers": config["num_hidden_layers"]}, {}, ())
"""
PEBBLE = {"model_type": "pebble", "num_hidden_layers": 2}


@pytest.fixture
def pebble(install: Any) -> None:
    install("slime-family-pebble", "1", {"pebble": "pebble_light"}, {"pebble_light": LIGHT, "pebble_impl": IMPL})


def models(family: str | None = None) -> Models:
    return Models.installed(RunConfig(checkpoint=CheckpointOptions(model_family=family)))


@pytest.mark.parametrize("model_type", ["pebble", "boulder"])
@pytest.mark.usefixtures("pebble")
def test_a_third_party_family_describes_the_models_of_its_types(model_type: str) -> None:
    found = models().describe(PEBBLE | {"model_type": model_type})
    assert (found.family, found.transformer) == ("pebble", {"num_layers": 2})


@pytest.mark.usefixtures("pebble")
def test_other_models_keep_their_family() -> None:
    assert models().describe(example("qwen3")).family == "qwen3"


@pytest.mark.usefixtures("pebble")
def test_a_run_may_name_another_family() -> None:
    assert models("pebble/pebble").describe(PEBBLE | {"model_type": "qwen3"}).family == "pebble"


@pytest.mark.usefixtures("pebble")
def test_a_model_with_another_head_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"architectures is \['PebbleForTokens'\].* trains PebbleForCausalLM"):
        models().describe(PEBBLE | {"architectures": ["PebbleForTokens"]})


def test_a_model_without_a_family_is_refused_with_the_nearest() -> None:
    with pytest.raises(PluginNotFoundError, match=r"model family 'qwen33' .*Did you mean qwen3\?"):
        models().describe(example("qwen3") | {"model_type": "qwen33"})


@pytest.mark.usefixtures("pebble")
def test_the_check_of_a_family_without_an_example_says_what_is_missing() -> None:
    checked = check_component(survey_plugins().find("family", "pebble"))
    assert checked.problems == checked.kept == []
    assert checked.notes == ["not checked, because its FamilySpec has no `example`, a small config.json"]
