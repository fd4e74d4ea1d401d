"""The `[plugins]` section from flags and from the run file, before a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Slime


@pytest.fixture(autouse=True)
def installed(install_reward: Any) -> None:
    """One plugin that works and one that does not."""
    install_reward("math", "boxed")
    install_reward("bad", "x", source="import sympie\n")


def test_a_broken_plugin_does_not_stop_a_run_that_does_not_use_it(dry_run: Slime) -> None:
    ended = dry_run("--reward", "math/boxed")
    assert ended.code == 0
    assert "math/boxed  (slime-reward-math 0.3.1" in ended.out


@pytest.mark.parametrize("flag", ["--strict-plugins", "--plugins.strict"])
def test_strict_plugins_stops_the_run(refused: Callable[..., str], flag: str) -> None:
    assert "[plugins] strict is on, and plugin bad (slime-reward-bad 0.3.1) is broken" in refused(flag)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--plugins.deny", "math"], "[plugins] deny names it"),
        (["--plugins.deny", "slime_reward.Math"], "[plugins] deny names it"),
        (["--plugins.allow", "bad"], "[plugins] allow does not name it"),
        (["--no-plugins.autoload"], "[plugins] autoload is off"),
    ],
)
def test_a_component_of_a_denied_plugin_is_refused_with_the_reason(
    refused: Callable[..., str], flags: list[str], reason: str
) -> None:
    message = refused("--reward", "math/boxed", *flags)
    assert (
        f"reward math/boxed comes from slime-reward-math 0.3.1, which is installed but not loaded: {reason}" in message
    )


def test_allow_loads_a_plugin_without_autoload(dry_run: Slime) -> None:
    assert dry_run("--reward", "math/boxed", "--no-plugins.autoload", "--plugins.allow", "math").code == 0


def test_denying_the_broken_plugin_satisfies_strict(dry_run: Slime) -> None:
    assert dry_run("--strict-plugins", "--plugins.deny", "bad").code == 0


def test_allowing_a_missing_plugin_suggests_the_nearest(refused: Callable[..., str]) -> None:
    assert "allow names 'mth', which is not installed. Did you mean math?" in refused("--plugins.allow", "mth")


def test_the_run_file_has_the_same_settings(dry_run: Slime, refused: Callable[..., str], tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('[plugins]\nrequire = ["slime-reward-math>=0.3,<0.4"]\nallow = ["math"]\nstrict = true\n')
    assert dry_run(str(run), "--reward", "math/boxed").code == 0  # `bad` is not loaded, so it does not count as broken
    run.write_text('[plugins]\nautoload = false\ndeny = ["bad"]\n')
    assert "[plugins] autoload is off" in refused(str(run), "--reward", "math/boxed")
    run.write_text("[plugins]\nstrictly = true\n")
    assert "strictly" in refused(str(run))


def test_turns_of_a_generator_with_one_turn_are_refused(refused: Callable[..., str], dry_run: Slime) -> None:
    message = refused("--max-turns", "3")
    assert "error: --max-turns 3 has no effect: generator generators/single_turn (slime-rl" in message
    assert "has no effect" not in dry_run("--max-turns", "3", "--generator", "tool_loop").err


def test_options_of_engines_are_noted_in_a_run_without_any(slime: Slime, base_words: list[str]) -> None:
    words = [word for word in base_words if word not in ("--advantage-estimator", "grpo", "--reward", "exact_match")]
    words += ["--loss-type", "sft_loss", "--rollout-temperature", "0.5", "--sglang-log-level", "info"]
    ended = slime("train", "--dry-run", *words, "--engine-port", "19014")
    assert ended.code == 0, ended.err
    notes = [line for line in ended.out.splitlines() if "starts no engines" in line]
    stated = [line.removeprefix("notes").strip().split(" has no effect")[0] for line in notes]
    assert stated == ["--engine-port 19014", "--rollout-temperature 0.5", "--sglang-log-level"]
