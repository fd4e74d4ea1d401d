"""Every flag of the trainer moves a number, is refused, is noted, or is listed with the reason why it moves nothing."""

from __future__ import annotations

import re
import typing
from typing import Any

import pytest
from tests.config.conftest import GOOD
from tests.train.flag_cases import (
    DESCRIBES,
    LAYOUT,
    LENGTHS,
    MOVES,
    MOVES_EXPERTS,
    NEUTRAL,
)

from slime.config import config_problems, read_config
from slime.config.flag_table import flags_of
from slime.config.flags import MEGATRON, Flag
from slime.config.installed import known_options
from slime.config.megatron_effects import dependent_notes, is_default, matches

KNOWN = known_options("megatron")
REFUSED = [(row["options"], row["why"]) for row in KNOWN["refused"]]
NOTED, REFUSED_ALONE = (
    [(row["options"], row["why"]) for row in KNOWN["dependent"] if bool(row.get("refused")) == refused]
    for refused in (False, True)
)
DEPENDENT = [*NOTED, *REFUSED_ALONE]
FLAGS = {flag.key: flag for flag in flags_of(MEGATRON) if flag.alias_of is None and not flag.refusal}


def another_value(flag: Flag) -> Any:
    """A valid value that is not the default."""
    annotation = flag.type.annotation
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) is typing.Literal:
        return next(value for value in typing.get_args(annotation) if not is_default(flag, value))
    if annotation is bool:
        return flag.default != "True"
    if annotation in (int, float):
        return next(value for value in ((2, 3) if annotation is int else (0.5, 0.25)) if not is_default(flag, value))
    return [2] if "int" in str(annotation) else [0.5] if "float" in str(annotation) else "x"


def words(flag: Flag, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag.name}={str(value).lower()}"]
    return [f"--{flag.name}", *map(str, value if isinstance(value, list) else [value])]


# --- every option is in exactly one class --------------------------------------------------------------


def classes_of(key: str) -> list[str]:
    listed = {
        "moves a number": key in MOVES or key in MOVES_EXPERTS,
        "refused": key in KNOWN["unsupported"] or any(matches(key, names) for names, _ in REFUSED),
        "needs a GPU": key in KNOWN["gpu_only"] and not any(matches(key, names) for names, _ in (*NEUTRAL, *REFUSED)),
        "neutral": any(matches(key, names) for names, _ in NEUTRAL),
        "describes the model": key in DESCRIBES.split(),
        "layout": key in LAYOUT.split(),
        "a length": key in LENGTHS.split(),
    }
    found = [name for name, holds in listed.items() if holds]
    noted = any(matches(key, names) for names, _ in DEPENDENT)
    return found or (["noted"] if noted else [])


def test_every_megatron_option_is_classified_once() -> None:
    assert {key: classes_of(key) for key in FLAGS if len(classes_of(key)) != 1} == {}


def test_the_tables_name_only_options_that_exist() -> None:
    patterns = " ".join(names for names, _ in (*REFUSED, *DEPENDENT, *NEUTRAL))
    for word in f"{patterns} {DESCRIBES} {LAYOUT} {LENGTHS}".split():
        assert any(matches(key, word) for key in FLAGS), word
    assert MOVES.keys() | MOVES_EXPERTS.keys() <= FLAGS.keys()


# --- refused and noted -------------------------------------------------------------------------------


def test_what_would_change_nothing_or_one_side_is_refused_by_name() -> None:
    flags = [flag for key, flag in FLAGS.items() if any(matches(key, names) for names, _ in REFUSED)]
    stated = [word for flag in flags for word in words(flag, another_value(flag))]
    refused = [problem for problem in config_problems(read_config([*GOOD, *stated])) if "cannot be used" in problem]
    assert len(refused) == len(REFUSED)
    named = {name for problem in refused for name in re.findall(r"--([\w-]+)", problem)}
    assert {flag.name for flag in flags if not {flag.name, f"no-{flag.name}"} & named} == set()


def test_the_defaults_of_refused_options_are_accepted() -> None:
    flags = [flag for key, flag in FLAGS.items() if any(matches(key, names) for names, _ in REFUSED)]
    stated = [word for flag in flags if has_default(flag) for word in words(flag, default_of(flag))]
    assert len(stated) > 50
    assert config_problems(read_config([*GOOD, *stated])) == []


def has_default(flag: Flag) -> bool:
    return flag.default not in ("None", "", "list") and is_default(flag, default_of(flag))


def default_of(flag: Flag) -> Any:
    try:
        return eval(flag.default, {})  # the text of Megatron's source
    except NameError:
        return flag.default.rpartition(".")[2]


def test_what_only_another_dispatcher_reads_is_noted() -> None:
    stated = "--moe-token-dispatcher-type flex --moe-hybridep-num-sms 8"
    [note] = dependent_notes(read_config([*GOOD, *stated.split()]))
    assert note == "--moe-hybridep-num-sms 8 has no effect without --moe-flex-dispatcher-backend hybridep"
    assert not [*dependent_notes(read_config([*GOOD, *stated.split(), "--moe-flex-dispatcher-backend", "hybridep"]))]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_what_lacks_another_option_is_noted(optimizer: str) -> None:
    expected = [
        (flag, why)
        for key, flag in FLAGS.items()
        for names, why in NOTED
        # What is missing must not be stated for another of them.
        if matches(key, names) and f"--optimizer {optimizer}" not in why and "flex-dispatcher-backend" not in why
    ]
    stated = [word for flag, _ in expected for word in words(flag, another_value(flag))]
    notes = list(dependent_notes(read_config([*GOOD, "--optimizer", optimizer, *stated])))
    for flag, why in expected:
        assert any(re.search(rf"--(no-)?{flag.name} .*has no effect.*{re.escape(why)}", note) for note in notes), flag
    assert len(notes) == len(expected)


@pytest.mark.parametrize(("names", "why"), REFUSED_ALONE)
def test_what_megatron_refuses_without_another_option_is_refused_at_once(names: str, why: str) -> None:
    flags = [flag for key, flag in FLAGS.items() if matches(key, names)]
    stated = [word for flag in flags for word in words(flag, another_value(flag))]
    problems = config_problems(read_config([*GOOD, *stated]))
    for flag in flags:
        assert any(re.search(rf"--(no-)?{flag.name} .*cannot be used {why}", problem) for problem in problems), flag


@pytest.mark.parametrize(
    ("stated", "refused"),
    [
        ("--window-size 128 0", True),
        ("--softmax-type off-by-one", True),
        ("--softmax-scale 0.5", True),
        ("--moe-hybridep-num-sms 8", False),
        ("--moe-input-jitter-eps 0.1", True),
        ("--moe-router-load-balancing-type sinkhorn", True),
        ("--moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type alltoall", False),
        ("--moe-aux-loss-coeff 0 --softmax-type vanilla --attention-dropout 0 --hidden-dropout 0.0", False),
        ("--expert-tensor-parallel-size 1 --no-masked-softmax-fusion --attention-softmax-in-fp32", False),
    ],
)
def test_flags_of_scripts(stated: str, refused: bool) -> None:
    problems = config_problems(read_config([*GOOD, *stated.split()]))
    assert bool(problems) == refused, problems


def test_one_sentence_for_options_with_one_reason() -> None:
    stated = [*GOOD, "--moe-router-fusion", "--moe-enable-routing-replay"]
    [problem] = config_problems(read_config(stated))
    assert problem == (
        "--moe-router-fusion, --moe-enable-routing-replay cannot be used: slime's routers count the load of each expert"
        " and replay the engine's choice, which Megatron's do not. Drop them"
    )


def test_sequence_parallel_alone_is_noted() -> None:
    [note] = dependent_notes(read_config([*GOOD, "--sequence-parallel"]))
    assert note == "--sequence-parallel has no effect without --tensor-model-parallel-size"
    beside = ["--tensor-model-parallel-size", "2", "--actor-num-gpus-per-node", "2"]
    assert list(dependent_notes(read_config([*GOOD, "--sequence-parallel", *beside]))) == []
