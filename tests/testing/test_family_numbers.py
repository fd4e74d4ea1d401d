"""The comparison of a model family with transformers fails for each kind of difference, and says where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.distributions import Install, install
from tests.support.families import architecture
from tests.support.tiny_models import FAMILIES, published
from torch import Tensor

from slime.testing import assert_family_matches_transformers
from slime.testing.family_numbers import Step, compare, layouts_of
from slime.testing.random_models import transformers_model, write_random_model

__all__ = ["install"]

WRONG = """
    from dataclasses import replace
    import slime.plugin as sp
    from slime_families.dense import Llama

    slime_api = 1

    class Positions(Llama):
        def describe(self, config):
            found = super().describe(config)
            return replace(found, gpt={**found.gpt, "rotary_base": 20000.0})

    @sp.hookimpl
    def slime_register_families():
        causal_lm = "LlamaForCausalLM"
        return [sp.FamilySpec(name="positions", factory="wrong:Positions", model_types=("x",), causal_lm=causal_lm)]
"""


matches = partial(assert_family_matches_transformers, "qwen3")


def tensors(**changes: float) -> dict[str, Tensor]:
    return {name: torch.full((2, 3), changes.get(name, 0.0)) for name in ("a", "b")}


RIGHT = Step([np.zeros(3, dtype=np.float32)], 2.0, tensors(), tensors(a=1e-3, b=1e-3))


def test_equal_numbers_are_accepted() -> None:
    found = compare(RIGHT, "TP=2", RIGHT)
    assert (found.layout, found.log_probs, found.weights, found.problems) == ("TP=2", 0.0, 0.0, ())
    assert found.moved == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_probs": [np.array([0, 2e-4, 0])]}, "log-probs differ by 0.0002; expected less than 0.0001"),
        ({"log_probs": [np.array([0, np.nan, 0])]}, "log-probs differ by nan"),
        ({"loss": 2.001}, "the loss is 2.001; expected 2.0"),
        ({"before": tensors(b=1e-8)}, "loading and exporting changed 1 tensors: b"),
        ({"before": {"a": RIGHT.before["a"]}}, "1 tensors do not match: b is only in the files"),
        ({"before": tensors() | {"c": torch.zeros(1)}}, "c is only in the export"),
        ({"before": tensors() | {"b": torch.zeros(3, 2)}}, "loading and exporting changed 1 tensors: b"),
        ({"after": tensors(a=1e-3, b=1.02e-3)}, "weights differ by more than 1e-05: b by 2e-05"),
        ({"after": tensors(a=1e-3, b=float("nan"))}, "b by inf"),
    ],
)
def test_a_difference_is_named(change: dict[str, Any], message: str) -> None:
    assert any(message in problem for problem in compare(RIGHT, "one rank", replace(RIGHT, **change)).problems)


def test_a_step_that_changes_nothing_shows_nothing() -> None:
    still = replace(RIGHT, after=tensors())
    assert "this shows nothing" in compare(still, "one rank", still).problems[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_are_those_that_divide_the_model(family: str) -> None:
    expected = ("one rank", "TP=2", "PP=2")
    experts = {"num_experts", "n_routed_experts"} & published(family).keys()
    assert layouts_of(architecture(published(family))) == (expected if not experts else (*expected, "EP=2"))


@pytest.mark.parametrize(
    ("changes", "missing"),
    [({"num_key_value_heads": 1}, "TP=2"), ({"intermediate_size": 33}, "TP=2"), ({"num_hidden_layers": 1}, "PP=2")],
)
def test_layouts_that_do_not_divide_the_model_are_left_out(changes: dict[str, int], missing: str) -> None:
    assert missing not in layouts_of(architecture(published("llama") | changes))


def test_a_model_is_what_its_config_and_seed_say(tmp_path: Path) -> None:
    config = published("kimi_k2") | {"num_nextn_predict_layers": 0}
    first, again, other = (
        transformers_model(write_random_model(tmp_path / str(number), config, seed=seed)).state_dict()
        for number, seed in enumerate((1, 1, 2))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert config == published("kimi_k2") | {"num_nextn_predict_layers": 0}  # transformers writes into its tables
    norms = [tensor for name, tensor in first.items() if "norm" in name]
    assert min(float((tensor - 1).abs().max()) for tensor in norms) > 0.05


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda: assert_family_matches_transformers("qwen3", {"architectures": ["PebbleForCausalLM"]}),
            "no class Pebble",
        ),
        (
            lambda: assert_family_matches_transformers("qwen3", published("qwen3"), layouts=["DP=2"]),
            "'DP=2' is none of",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(use: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        use()


@pytest.mark.engine
@pytest.mark.slow
def test_a_family_that_computes_something_else_is_found_out(install: Install) -> None:
    install("slime-family-wrong", "1", {"wrong": "wrong"}, {"wrong": WRONG})
    with pytest.raises(
        AssertionError, match=r"family positions and .*\n- one rank: log-probs differ by .*\n- one rank"
    ):
        assert_family_matches_transformers("positions", published("llama"), layouts=["one rank"])
