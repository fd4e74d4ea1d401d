"""Every number that a user can state has a range: NaN, infinity and absurd numbers are refused before a run starts."""

from __future__ import annotations

import typing
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.config.conftest import Refused

from slime.config import RunConfig, read_config
from slime.config.flag_table import flags_of
from slime.config.flags import MEGATRON, SGLANG, Flag
from slime.config.options import RunOptions
from slime.config.run_config import SECTIONS
from slime.errors import ConfigError
from slime.registry.plugin_set import load_plugins

#: options for which these numbers mean something, with what
MEANINGFUL = {
    "--sglang-default-priority-value -9223372036854775808": "any priority is one",
    "--glu-linear-offset -1e300": "an offset may have any sign",
    "--eval-pass-threshold -1e300": "rewards may have any sign",
    "--eval-pass-threshold 1e300": "rewards have no upper bound",
}


def number_types(annotation: Any) -> set[type]:
    """int and float, if they are part of a type."""
    if annotation in (int, float):
        return {annotation}
    return set().union(*map(number_types, typing.get_args(annotation)))


def numeric_flags() -> Iterator[Flag]:
    for target in (*SECTIONS, MEGATRON, SGLANG):
        for flag in flags_of(target):
            if flag.alias_of is None and not flag.refusal and not flag.file_only and number_types(flag.type.annotation):
                yield flag


def problem_of(flag: Flag, word: str) -> str | None:
    try:
        read_config([f"--{flag.name}={word}"])
    except ConfigError as error:
        return str(error)
    return None


def test_the_walk_sees_the_numbers_of_all_parts() -> None:
    counts = Counter(flag.target for flag in numeric_flags())
    assert counts["rollout"] > 15 and counts[MEGATRON] > 90 and counts[SGLANG] > 120


@pytest.mark.slow
@pytest.mark.parametrize("word", ["nan", "inf", "-inf", "1e400", "9" * 30, "-" + "9" * 30, "9" * 5000])
def test_no_option_takes_a_number_that_is_none_or_that_nothing_can_hold(word: str) -> None:
    fits_a_float = word.strip("-").isdigit() and len(word) < 300
    taken = [
        flag.spelled
        for flag in numeric_flags()
        # A float can hold 30 digits; its sign is checked below.
        if problem_of(flag, word) is None and not (fits_a_float and float in number_types(flag.type.annotation))
    ]
    assert taken == []


def test_no_option_takes_a_number_far_below_its_range() -> None:
    for flag in numeric_flags():
        word = "-1e300" if float in number_types(flag.type.annotation) else str(-(2**63))
        if f"--{flag.name} {word}" not in MEANINGFUL:
            problem = problem_of(flag, word)
            assert problem is not None, flag.spelled
            assert problem.startswith(f"--{flag.name}: ") and "expected" in problem


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lr 0", "--lr: got '0', expected more than 0"),
        ("--lr 1e30", "--lr: got '1e30', expected at most 10"),
        ("--device cuda:1", "got 'cuda:1', expected cuda: which of the GPUs is for CUDA_VISIBLE_DEVICES to say"),
        ("--no-load-optim", "--initial-megatron-checkpoint starts a new one from the weights alone"),
        ("--lr -1e-6", "--lr: got '-1e-6', expected more than 0"),
        ("--adam-beta1 1", "--adam-beta1: got '1', expected less than 1"),
        ("--min-lr -1", "--min-lr: got '-1', expected at least 0"),
        ("--seed 18446744073709551616", "expected at most 2147483647"),
        ("--rollout-seed -1", "--rollout-seed: got '-1', expected at least 0"),
        ("--sglang-random-seed 4294967296", "expected at most 4294967295"),
        ("--sglang-mem-fraction-static 1", "expected less than 1"),
        ("--step-timeout-s 1e300", "--step-timeout-s: got '1e300', expected at most 31622400"),
        ("--rollout-num-gpus 1000000000000", "expected at most 65536"),
        ('--apply-chat-template-kwargs {"a":[1,NaN]}', "kwargs.a[1]: got NaN, expected a finite number"),
        ("--num-rollout 9223372036854775808", "--num-rollout: got a number of 64 bits, expected at most 64 bits with"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_bound(refused: Refused, words: str, message: str) -> None:
    problem = refused(*words.split())
    assert message in problem and "problems:" not in problem


def test_the_ends_of_a_range_are_accepted() -> None:
    config = read_config(["--seed=2147483647", "--adam-beta1=0", "--lr=1e-30", "--sglang-chunked-prefill-size=-1"])
    assert (config.run.seed, config.megatron["adam_beta1"], config.sglang["chunked_prefill_size"]) == (2**31 - 1, 0, -1)


def test_a_configuration_made_in_python_has_the_same_ranges() -> None:
    with pytest.raises(ValueError, match="less than or equal to 2147483647"):
        RunOptions(seed=2**64)


def test_options_of_components_have_no_infinite_numbers() -> None:
    """The base class of options refuses them, so this holds for every plugin."""
    numbers = 0
    for component in load_plugins(RunConfig().plugins).components():
        if not component.found.package.startswith("slime-rl"):
            continue
        options = component.spec.options
        for name, field in options.model_fields.items():
            if float in number_types(field.annotation):
                numbers += 1
                for value in (float("nan"), float("inf")):
                    with pytest.raises(ValueError, match=r"finite|less than|greater than"):
                        options.model_validate({name: value})
    assert numbers > 10
