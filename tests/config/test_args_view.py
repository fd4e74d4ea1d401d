"""`args` of users' functions: all options of the run as read-only attributes."""

from __future__ import annotations

import copy
import pickle

import pytest

from slime.compat.args_view import ArgsView
from slime.config import RunConfig
from slime.config.options import RolloutOptions


@pytest.fixture
def args() -> ArgsView:
    config = RunConfig(
        rollout=RolloutOptions(rollout_batch_size=8, max_turns=5),
        megatron={"hidden_size": 64, "hidden_dropout": 0.25},
        sglang={"mem_fraction_static": 0.4},
    )
    return ArgsView(config)


def test_slime_and_engine_options_are_attributes(args: ArgsView) -> None:
    assert (args.rollout_batch_size, args.max_turns, args.eps_clip_high) == (8, 5, None)
    assert (args.hidden_size, args.hidden_dropout, args.sglang_mem_fraction_static) == (64, 0.25, 0.4)


def test_an_engine_option_that_is_not_set_has_its_default(args: ArgsView) -> None:
    assert args.attention_dropout == 0.1
    assert args.sglang_tp_size == 1


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("rollout_batchsize", "rollout_batch_size"),
        ("hiden_size", "hidden_size"),
        ("sglang_mem_fraction_sttic", "sglang_mem_fraction_static"),
    ],
)
def test_an_unknown_attribute_is_refused_with_a_suggestion(args: ArgsView, name: str, nearest: str) -> None:
    with pytest.raises(AttributeError, match=f"args has no {name}: .* Did you mean {nearest}?"):
        getattr(args, name)
    assert getattr(args, name, 3) == 3


def test_attributes_cannot_be_set(args: ArgsView) -> None:
    with pytest.raises(AttributeError, match=r"args.max_turns cannot be set: the configuration of a run is frozen"):
        args.max_turns = 6
    with pytest.raises(AttributeError, match="cannot be set"):
        del args.max_turns
    assert args.max_turns == 5


def test_it_can_be_pickled_and_copied(args: ArgsView) -> None:
    for other in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args)):
        assert (other.max_turns, other.hidden_size) == (5, 64)


def test_dir_lists_the_attributes(args: ArgsView) -> None:
    assert {"rollout_batch_size", "hidden_size", "sglang_mem_fraction_static"} <= set(dir(args))
