"""`slime train --help` shows the options of the components that the rest of the command line chooses."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cli.conftest import Slime


def block_of(text: str, start: str) -> list[str]:
    """The lines of the help's block whose title begins with `start`."""
    _, _, rest = text.partition(f"\n{start}")
    return rest.split("\n\n")[0].splitlines()[1:]


def test_a_chosen_components_options_are_shown_with_their_flags(slime: Slime) -> None:
    shown = slime("train", "--help", "--reward", "exact_match", "--advantage-estimator", "grpo").out
    reward = block_of(shown, "[reward]  Options of reward rewards/exact_match (slime-rl")
    assert any(re.match(r"  --reward\.ignore-case +true or false ", line) for line in reward)
    assert any("--reward.timeout-s" in line and "> 0" in line for line in reward)
    estimator = block_of(shown, "[estimator]  Options of estimator estimators/grpo")
    assert any("1e-06" in line and "--estimator.eps" in line for line in estimator)
    assert not any("timeout-s" in line for line in estimator)


def test_options_of_default_components_are_shown(slime: Slime) -> None:
    shown = slime("train", "--help").out
    assert "\n[datasource]  Options of data source datasources/prompts" in shown
    assert "\n[generator]  Options of generator generators/single_turn" in shown
    assert "Options of reward" not in shown


def test_components_of_the_run_file_are_shown_with_keys_per_reward(slime: Slime, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[[reward.terms]]\nname = "exact_match"\nweight = 0.5\n', encoding="utf-8")
    keys = block_of(slime("train", str(file), "--help").out, "[[reward.terms]]  Keys of the table of reward")
    assert any(line.startswith("  ignore-case ") for line in keys)


def test_a_missing_component_is_reported_and_the_rest_is_shown(slime: Slime) -> None:
    done = slime("train", "--help", "--reward", "exct_match")
    assert done.code == 0
    assert "[reward]  reward 'exct_match' is not installed. Did you mean exact_match?" in done.out
    assert "Options of generator" in done.out


def test_help_works_with_an_invalid_command_line(slime: Slime) -> None:
    done = slime("train", "--help", "--rewrad", "x")
    assert done.code == 0
    assert "--rollout-batch-size" in done.out
    assert "not shown, because this command line cannot be read: unknown flag --rewrad" in done.out
