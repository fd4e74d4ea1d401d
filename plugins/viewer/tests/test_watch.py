"""A run warns, while it goes on, when all samples have the same reward."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from slime.config import PluginOptions, RunConfig
from slime.config.options import RunOptions
from slime.registry.plugin_set import load_plugins
from slime_viewer.watch import RewardWatch


def told_at(rewards: list[tuple[float, float]]) -> dict[int, str]:
    """Step -> what was told; of each step the mean reward and its standard deviation."""
    watch = RewardWatch(Path("outputs/it is mine"))
    steps = (
        (step, watch.step(step, {"rollout/reward_mean": mean, "rollout/reward_std": spread}))
        for step, (mean, spread) in enumerate(rewards)
    )
    return {step: told for step, told in steps if told}


def test_reward_zero_is_told_after_ten_rollouts_and_at_each_doubling() -> None:
    told = told_at([(0.0, 0.0)] * 45)
    assert list(told) == [9, 19, 39]
    assert told[19].startswith("every sample of the last 20 rollouts has the reward 0")
    assert told[19].endswith("slime show 'outputs/it is mine' --step 19 --worst 3")


def test_any_other_reward_begins_the_count_anew() -> None:
    assert told_at([(0.0, 0.0)] * 9 + [(0.1, 0.3)] + [(0.0, 0.0)] * 9) == {}
    assert list(told_at([(0.0, 0.0)] * 5 + [(1.0, 0.0)] * 10)) == [14]
    assert told_at([(0.5, 0.2)] * 50) == {}
    assert RewardWatch(Path()).step(0, {"train/loss": 1.0}) is None


def test_a_run_tells_it_as_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    call = load_plugins(PluginOptions(allow=["viewer"])).observe
    for _ in range(2):  # a run that starts anew counts anew
        call("slime_run_started", run_dir=tmp_path, config=RunConfig())
        for step in range(9):
            call("slime_step_finished", step=step, metrics={"rollout/reward_mean": 0.0, "rollout/reward_std": 0.0})
    assert caplog.records == []
    call("slime_step_finished", step=9, metrics={"rollout/reward_mean": 0.0, "rollout/reward_std": 0.0})
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "the last 10 rollouts has the reward 0" in record.getMessage()


def test_a_run_names_its_page_when_it_starts_unless_it_is_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = load_plugins(PluginOptions(allow=["viewer"])).observe
    call("slime_run_started", run_dir=tmp_path / "it is mine", config=RunConfig())
    assert capsys.readouterr().out == f"in the browser: slime view '{tmp_path}/it is mine'\n"
    call("slime_run_started", run_dir=tmp_path, config=RunConfig(run=RunOptions(quiet=True)))
    assert capsys.readouterr().out == ""
