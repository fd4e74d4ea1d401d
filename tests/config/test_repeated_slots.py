"""A slot that several components may fill, that of trackers: flags and tables choose them and set their options."""

from __future__ import annotations

from typing import Any

import pytest

from slime.config import config_from_toml, read_config
from slime.errors import ConfigError
from slime.registry.resolve import components_used


def answer(stated: str | list[str]) -> Any:
    """The trackers that a run file (a string) or a command line (a list) chooses, or why it is refused."""
    try:
        config = config_from_toml(stated) if isinstance(stated, str) else read_config(stated)
    except ConfigError as error:
        return str(error)
    assert config_from_toml(config.to_toml()) == config
    return [(use.slot, use.name, use.options) for use in components_used(config) if use.kind == "tracker"]


@pytest.mark.parametrize(
    ("stated", "chosen"),
    [
        ([], [("tensorboard", {})]),
        (["--tracker", "a", "b"], [("a", {}), ("b", {})]),
        (["--tracker", "a", "--tracker", "b"], [("a", {}), ("b", {})]),
        (["--tracker.log-dir", "x"], [("tensorboard", {"log_dir": "x"})]),
        (["--tracker", "a", "b", "--tracker.b.log-dir", "x"], [("a", {}), ("b", {"log_dir": "x"})]),
        ('tracker = ["a", "b"]', [("a", {}), ("b", {})]),
        ("tracker = []", []),
        ('tracker = "none"', []),
        ('[[tracker]]\nname = "none"', []),
        (["--tracker", "none"], []),
        (["--tracker=none"], []),
        ('[tracker]\nname = "a"\nlog-dir = "x"', [("a", {"log_dir": "x"})]),
        ('[[tracker]]\nname = "a"\n[[tracker]]\nname = "b"\nn = 2', [("a", {}), ("b", {"n": 2})]),
    ],
)
def test_flags_and_tables_select_several_trackers_and_set_their_options(
    stated: str | list[str], chosen: list[tuple[str, dict[str, Any]]]
) -> None:
    assert answer(stated) == [(f"tracker[{number}]", *one) for number, one in enumerate(chosen)]


def test_none_excludes_other_components_and_options() -> None:
    for stated in (["--tracker", "a", "none"], ["--tracker", "a", "--tracker", "none"]):
        assert answer(stated) == "--tracker: none means no component: expected it alone and without options"
    problem = answer(["--tracker", "none", "--tracker.log-dir", "x"])
    assert problem.endswith("none means no component: expected it alone and without options")


def test_an_option_must_belong_to_exactly_one_component() -> None:
    ambiguous, wrong = answer(["--tracker", "a", "b", "--tracker.log-dir", "x"]), answer("tracker = 5")
    assert ambiguous.startswith("--tracker.log-dir: expected an option of exactly one tracker, chosen: a, b. Write")
    assert wrong == "run file: tracker: got 5, expected a table"
