"""A kind of which a run may have several components needs only a row in the table of kinds."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

_WITH_TRACKERS = """
import dataclasses, json, sys
from slime.registry import kinds
slot = kinds.Slot(
    "tracker", "components", "tracker", list_key="tracker", help="where metrics go", default=("board",)
)
kinds.KINDS["tracker"] = dataclasses.replace(kinds.KINDS["reward"], name="tracker", slots=(slot,))
kinds.SLOTS["tracker"] = slot
from slime.config import config_from_toml, read_config
from slime.errors import ConfigError
from slime.registry.resolve import components_used
def answer(stated):
    try:
        config = read_config(stated) if isinstance(stated, list) else config_from_toml(stated)
    except ConfigError as error:
        return str(error)
    assert config_from_toml(config.to_toml()) == config
    return [[use.slot, use.name, use.options] for use in components_used(config) if use.kind == "tracker"]
print(json.dumps([answer(stated) for stated in json.loads(sys.argv[1])]))
"""


def answers(*stated: str | list[str]) -> list[Any]:
    """The trackers that each run file (a string) or command line (a list) chooses, or why it is refused."""
    done = subprocess.run(
        [sys.executable, "-c", _WITH_TRACKERS, json.dumps(stated)],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    found: list[Any] = json.loads(done.stdout)
    return found


def test_flags_and_tables_select_several_trackers_and_set_their_options() -> None:
    cases: list[tuple[str | list[str], Any]] = [
        ([], [["tracker[0]", "board", {}]]),
        (["--tracker", "a", "b"], [["tracker[0]", "a", {}], ["tracker[1]", "b", {}]]),
        (["--tracker", "a", "--tracker", "b"], [["tracker[0]", "a", {}], ["tracker[1]", "b", {}]]),
        (["--tracker.log-dir", "x"], [["tracker[0]", "board", {"log_dir": "x"}]]),
        (
            ["--tracker", "a", "b", "--tracker.b.log-dir", "x"],
            [["tracker[0]", "a", {}], ["tracker[1]", "b", {"log_dir": "x"}]],
        ),
        ('tracker = ["a", "b"]', [["tracker[0]", "a", {}], ["tracker[1]", "b", {}]]),
        ("tracker = []", []),
        ('tracker = "none"', []),
        ('[[tracker]]\nname = "none"', []),
        (["--tracker", "none"], []),
        (["--tracker=none"], []),
        ('[tracker]\nname = "a"\nlog-dir = "x"', [["tracker[0]", "a", {"log_dir": "x"}]]),
        (
            '[[tracker]]\nname = "a"\n[[tracker]]\nname = "b"\nn = 2',
            [["tracker[0]", "a", {}], ["tracker[1]", "b", {"n": 2}]],
        ),
    ]
    for (stated, expected), found in zip(cases, answers(*(stated for stated, _ in cases)), strict=True):
        assert found == expected, stated


@pytest.mark.slow
def test_none_excludes_other_components_and_options() -> None:
    for stated in (["--tracker", "a", "none"], ["--tracker", "a", "--tracker", "none"]):
        assert answers(stated) == ["--tracker: none means no component: expected it alone and without options"]
    [problem] = answers(["--tracker", "none", "--tracker.log-dir", "x"])
    assert problem.endswith("none means no component: expected it alone and without options")


def test_an_option_must_belong_to_exactly_one_component() -> None:
    ambiguous, wrong = answers(["--tracker", "a", "b", "--tracker.log-dir", "x"], "tracker = 5")
    assert ambiguous.startswith("--tracker.log-dir: expected an option of exactly one tracker, chosen: a, b. Write")
    assert wrong == "run file: tracker: got 5, expected a table"
