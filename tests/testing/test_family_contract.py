"""The contract of model families names each broken rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.support.families import architecture
from tests.support.tiny_models import FAMILIES, published

from slime.plugin import NoOptions
from slime.plugin.architecture import Architecture, PredictingLayers, Rule
from slime.testing import assert_family_contract, make_context
from slime_families.dense import Llama
from slime_families.examples import example

LLAMA = example("llama")


class Changed:
    """Llama, with its description changed."""

    def __init__(self, change: Callable[[Architecture], Any]) -> None:
        self.llama = Llama(NoOptions(), make_context())
        self.change = change

    def describe(self, config: Mapping[str, Any]) -> Any:
        return self.change(self.llama.describe(config))


def with_rules(change: Callable[[Rule], list[Rule]]) -> Callable[[Architecture], Architecture]:
    return lambda found: replace(found, rules=tuple(new for one in found.rules for new in change(one)))


def of_qkv(**fields: Any) -> Callable[[Architecture], Architecture]:
    return with_rules(lambda one: [replace(one, **fields) if one.layout == "qkv" else one])


def keywords(**more: Any) -> Callable[[Architecture], Architecture]:
    return lambda found: replace(found, transformer=found.transformer | more)


def predicting(copies: dict[str, str], *carried: str) -> Callable[[Architecture], Architecture]:
    rule = Rule("mtp.layers.0.enorm.weight", {"model.layers.2.enorm.weight": (64,)}, "")
    return lambda found: replace(found, carried=carried, predicting=PredictingLayers(1, (rule,), copies))


def drop(part: str) -> Callable[[Architecture], Architecture]:
    return with_rules(lambda one: [] if part in one.megatron else [one])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: None, "describes a model of its own: Changed.describe returned NoneType; expected Architecture"),
        (keywords(activation_func=max), "in a form that JSON can hold: .*not JSON serializable"),
        (keywords(moe_layer_freq=(0, 1)), r"as JSON it becomes .*\[0, 1\]"),
        (keywords(num_layers=None), "states the sizes of the model: .*'num_layers': None"),
        (with_rules(lambda one: [one, one]), "rules name Megatron tensors more than once: .* and 1. more"),
        (with_rules(lambda one: [replace(one, hf={"a": (64,)})]), "Hugging Face tensors more than once: a"),
        (drop("final_layernorm"), "no rule for decoder.final_layernorm.weight"),
        (drop("layers.1."), r"no rule for decoder.layers.1\."),
        (keywords(num_layers=1), r"rules for layers \[1\]; the model has 1"),
        (of_qkv(groups=3), r"linear_qkv.weight: layout 'qkv' with \[64, 32, 32\] rows and groups 3"),
        (of_qkv(parallel_dim=1), "layout 'qkv' with parallel_dim 1; expected 0"),
        (of_qkv(parallel_dim=2), "parallel_dim is 2"),
        (of_qkv(expert=0), "expert 0; the model has 0"),
        (of_qkv(hf={"a": (0, 64)}), "of whole numbers above 0"),
        (lambda found: replace(found, carried=("model.",)), "says they are not trained: model.embed_tokens.weight"),
        (lambda found: replace(found, predicts=True), "predicts is True; expected False"),
        (predicting({}), "tensors of `predicting` that are not among those `carried`: model.layers.2.enorm.weight"),
        (predicting({"model.layers.2.a": "b"}, "model.layers.2."), "copies of tensors that no rule names: b"),
        (lambda found: replace(found, gpt=found.gpt | {"vocab_size": 1}), r"\[128\] rows; expected one tensor"),
    ],
)
def test_a_broken_rule_is_named(change: Callable[[Architecture], Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_family_contract(Changed(change), [LLAMA])


class Lenient:
    """Ignores some keys of the file."""

    def __init__(self, *ignored: str) -> None:
        self.llama = Llama(NoOptions(), make_context())
        self.ignored = ignored

    def describe(self, config: Mapping[str, Any]) -> Architecture:
        return self.llama.describe({key: value for key, value in config.items() if key not in self.ignored})


class Careless(Lenient):
    def describe(self, config: Mapping[str, Any]) -> Architecture:
        config["hidden_size"]
        return super().describe(config)


class Changing(Lenient):
    def describe(self, config: Any) -> Architecture:
        found = super().describe(config)
        config.pop("vocab_size")
        return found


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (Lenient("hidden_act"), "refuses an activation function .*: Lenient.describe, given hidden_act"),
        (Lenient("rope_scaling"), "refuses a scaling of positions .*: Lenient.describe, given rope_type"),
        (Careless(), "refuses a file without sizes: .*raised KeyError: 'hidden_size'; expected ConfigError"),
        (Lenient("vocab_size"), "raised ConfigError: config.json: vocab_size is missing"),
    ],
)
def test_a_family_that_does_not_read_the_file_strictly_is_named(family: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_family_contract(family, [LLAMA])


def test_a_family_that_changes_the_file_is_named() -> None:
    with pytest.raises(AssertionError, match="does not change its argument"):
        assert_family_contract(Changing(), [dict(LLAMA)])


def test_a_family_that_answers_differently_is_named() -> None:
    epsilons = iter(range(100))
    with pytest.raises(AssertionError, match="described one model in two ways"):
        assert_family_contract(
            Changed(lambda found: replace(found, transformer=found.transformer | {"x": next(epsilons)})), [LLAMA]
        )


def test_a_family_is_tried_on_something() -> None:
    with pytest.raises(ValueError, match="expected at least one"):
        assert_family_contract(Llama(NoOptions(), make_context()), [])


class Installed:
    """The family that a run would use."""

    def describe(self, config: Mapping[str, Any]) -> Architecture:
        return architecture(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_published_configurations_are_described(family: str) -> None:
    assert_family_contract(Installed(), [published(family), published(family) | {"tie_word_embeddings": True}])
