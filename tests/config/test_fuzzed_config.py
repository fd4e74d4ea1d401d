"""Any command line and any run file give a configuration or a `ConfigError`: at least 10,000 cases each.

hypothesis draws only seeds: drawing every word would take longer than reading the configuration.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.config.conftest import GOOD

from slime.config import config_from_toml, config_notes, config_problems, read_config, resolve
from slime.config.flag_table import flags_of
from slime.config.flags import MEGATRON, SGLANG
from slime.config.run_config import SECTIONS, RunConfig
from slime.errors import ConfigError, SlimeError
from slime.errors.redaction import MARK
from slime.registry.find import check_installed, choose_plugins, find_plugins
from slime.registry.kinds import SLOTS

pytestmark = pytest.mark.nightly

many = settings(
    max_examples=3_000, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True
)
seeds = st.integers(0, 2**32 - 1)
INSTALLED = find_plugins()
ALL = [flag for target in (*SECTIONS, MEGATRON, SGLANG) for flag in flags_of(target)]
FLAGS = [*sorted({flag.name for flag in ALL}), "reward.x", "reward.a.b", "tracker.wandb.x", "bogus", ""]
KEYS = [*sorted({flag.file_key for flag in ALL}), "", "a.b", "num-rollout", "é", "name", "options", "weight"]
TABLES = [*SECTIONS, MEGATRON, SGLANG, *SLOTS, "sampling-filter", "bogus"]
WORDS = ["", "-", "--", "=", "nan", "inf", "-1", "0", "1", "1e999", "1e999k", "9" * 30, "9" * 5000, "true", "none", "["]
WORDS += ["[" * 3000, "[[0]*99999]*99999", "([0]*3+[1])", "{", '{"a": ' * 2000, "{'a': 1}", '{"a": NaN}', "a" * 300]
WORDS += ["/", "..", "~", "a/b", "a.py:f", "a.b:c", "{rollout}", "{x}", "a=1", "f@[1:2]", "\0", "\udcff", "\ufeff", "é"]
VALUES: list[Any] = [
    *WORDS,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    -(2**70),
    0.0,
    1.5,
    -1e300,
    float("nan"),
    float("inf"),
]
VALUES += [datetime.date(1, 1, 1), datetime.time(0), [], {}]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Do not log thousands of names of plugins that are not installed."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def words(drawn: random.Random) -> list[str]:
    """A few flags, with and without values."""
    found = []
    for _ in range(drawn.randint(0, 4)):
        no, value = drawn.choice(["", "", "", "no-"]), drawn.choice(WORDS)
        flag = f"--{no}{drawn.choice(FLAGS)}"
        found += drawn.choice([[flag], [f"{flag}={value}"], [f"{flag}={value}"], [flag, f" {value}"]])
    return found


def value_of(drawn: random.Random, level: int = 0) -> Any:
    """A scalar, a list or a table."""
    kind = drawn.choice("ssssslt") if level < 3 else "s"
    if kind == "l":
        return [value_of(drawn, level + 1) for _ in range(drawn.randint(0, 3))]
    return table_of(drawn, level + 1) if kind == "t" else drawn.choice(VALUES)


def table_of(drawn: random.Random, level: int = 0) -> dict[str, Any]:
    return {drawn.choice(KEYS): value_of(drawn, level) for _ in range(drawn.randint(0, 3))}


def document_of(drawn: random.Random) -> dict[str, Any]:
    """Tables, lists of tables, and keys outside tables."""
    found: dict[str, Any] = {}
    for _ in range(drawn.randint(0, 3)):
        match drawn.choice("tttlk"):
            case "t":
                found[drawn.choice(TABLES)] = table_of(drawn)
            case "l":
                found[drawn.choice(TABLES)] = [table_of(drawn) for _ in range(drawn.randint(0, 2))]
            case "k":
                found[drawn.choice(KEYS)] = value_of(drawn)
    return found


def toml(document: dict[str, Any]) -> str:
    """A run file; empty if the document cannot be written."""
    try:
        text = tomli_w.dumps(document)
        text.encode()
    except (TypeError, ValueError):
        return ""
    return text


def use(config: RunConfig, seed: int) -> None:
    """What every command does with a configuration; now and then, it is saved and read again."""
    config_notes(config)
    complete = resolve(config)
    assert isinstance(config_problems(complete), list)
    if seed % 8 == 0:
        with contextlib.suppress(ConfigError):
            text = complete.to_toml()
            assert MARK in text or config_from_toml(text) == complete  # secrets are not written


@many
@given(seed=seeds)
def test_any_command_line(seed: int) -> None:
    drawn = random.Random(seed)
    argv = words(drawn)
    with contextlib.suppress(ConfigError):
        use(read_config([*GOOD, *argv] if drawn.random() < 0.3 else argv), seed)


@many
@given(seed=seeds)
def test_any_document_of_a_run_file(seed: int) -> None:
    with contextlib.suppress(ConfigError):
        use(config_from_toml(toml(document_of(random.Random(seed)))), seed)


@many
@given(text=st.text(st.sampled_from("[]{}=.,\"'\\#\n\t abx019-_:TZeInf\ufeff\0"), max_size=30))
def test_any_text_of_a_run_file(text: str) -> None:
    with contextlib.suppress(ConfigError):
        config_from_toml(text)


@many
@given(seed=seeds)
def test_any_table_of_plugins(seed: int) -> None:
    drawn = random.Random(seed)
    names = ("allow", "deny", "require", "autoload", "strict", "strct", "no-autoload")
    pieces = ["a", "slime-rl", ">=", "1", "1.*", ",", "<", "~=", "==", "[x]", ";", " ", "@", "é"]
    requirements = ["".join(drawn.choices(pieces, k=drawn.randint(0, 4))) for _ in range(drawn.randint(0, 2))]
    table = {name: drawn.choice([requirements, value_of(drawn)]) for name in drawn.sample(names, 2)}
    with contextlib.suppress(SlimeError):
        config = config_from_toml(toml({"plugins": table}))
        choose_plugins(INSTALLED, config.plugins)
        # `survey_plugins` makes the message of the error for a requirement that cannot be parsed.
        with contextlib.suppress(ValueError):
            check_installed(config.plugins.require, "[plugins] require")
