"""What a configuration without problems builds in the ranks: settings and schedule, or a `ConfigError`.

hypothesis draws only seeds: drawing every word would take longer than building the settings.
"""

from __future__ import annotations

import logging
import random
import typing
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.config.conftest import GOOD
from tests.train.test_settings import FOLDER

from slime.config import config_notes, config_problems, read_config, resolve
from slime.config.flag_table import flags_of
from slime.config.flags import MEGATRON, Flag
from slime.config.learning_rate import learning_rate_problems
from slime.config.megatron_checks import layout_problems
from slime.config.run_config import SECTIONS, RunConfig
from slime.config.value_types import Arity
from slime.errors import ConfigError
from slime.run.checkpoint.retention import Retention
from slime.train.optimizer import build_scheduler
from slime.train.settings import train_settings
from slime.weights.stated_model import contradictions

pytestmark = pytest.mark.nightly

ALL = [flag for target in (*SECTIONS, MEGATRON) for flag in flags_of(target)]
FLAGS = [flag for flag in ALL if flag.alias_of is None and not flag.refusal and not flag.file_only]
NUMBERS = ["0", "1", "2", "3", "7", "64", "65536", "4294967296", str(2**63 - 1)]
NUMBERS += ["1e-30", "1e-6", "0.5", "0.999", "1.0", "1e6", "1e18", "1e300"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def choices(annotation: Any) -> list[str]:
    """The words that an option takes, if they are listed."""
    if typing.get_origin(annotation) is typing.Literal:
        return [str(one) for one in typing.get_args(annotation)]
    return [one for part in typing.get_args(annotation) for one in choices(part)]


def word(drawn: random.Random, flag: Flag) -> str:
    if flag.type.arity is Arity.SWITCH:
        return f"--{drawn.choice(['', 'no-'])}{flag.name}"
    listed = choices(flag.type.annotation)
    return f"--{flag.name}={drawn.choice(listed if listed and drawn.random() < 0.8 else [*NUMBERS, 'a', '[1,0]'])}"


def config_of(seed: int) -> RunConfig | None:
    """A configuration with extreme values and without a problem; None if it is refused before anything starts."""
    drawn = random.Random(seed)
    words = [word(drawn, drawn.choice(FLAGS)) for _ in range(drawn.choice([1, 1, 2, 3]))]
    try:
        config = resolve(read_config([*GOOD, *words]))
    except ConfigError:
        return None
    config_notes(config)
    problems = [*config_problems(config), *contradictions(config.megatron, FOLDER, "m")]
    problems = problems or [*layout_problems(config, FOLDER.transformer)]
    return None if problems or any(learning_rate_problems(config, with_critic=seed % 2 == 0)) else config


@settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_the_checks_let_pass_can_be_built(seed: int) -> None:
    if (config := config_of(seed)) is None:
        return
    optimizer: Any = SimpleNamespace(param_groups=[{}])
    try:
        scheduler = build_scheduler(config, train_settings(config, FOLDER), optimizer)
    except ConfigError as error:
        assert str(error).startswith("Megatron's"), error  # its own checks, which need its classes
        return
    for steps in (1, 10, 10**6):
        scheduler.step(increment=steps)
        assert 0 <= optimizer.param_groups[0]["lr"] <= 10
    Retention(config.checkpoint, config.evaluation.eval_interval, config.rollout.num_rollout).superfluous([1, 2], 2)
    assert config.to_toml()
