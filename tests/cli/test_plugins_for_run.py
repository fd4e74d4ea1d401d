"""`slime plugins --for RUN.toml`: the components of one run, and whether they can be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from slime.cli.plugins import run
from slime.cli.plugins_json import RunListing
from slime.errors import ConfigError

RUN = """
[rollout]
n_samples_per_prompt = 4
[algorithm]
advantage_estimator = "grpo"
[reward]
name = "boxed"
"""


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return str(path)


def listed(capsys: pytest.CaptureFixture[str], *words: str, code: int) -> dict[str, Any]:
    assert run(["--json", "--for", *words]) == code
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(content, RunListing.model_json_schema())
    return content


def use(content: dict[str, Any], slot: str) -> dict[str, Any]:
    [found] = [use for use in content["uses"] if use["slot"] == slot]
    assert isinstance(found, dict)
    return found


def test_only_what_the_run_uses_is_listed(
    install_reward: Any, run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install_reward("math", "boxed")
    install_reward("other", "unused")
    install_reward("bad", "x", source="import sympie\n")
    content = listed(capsys, run_file, code=0)
    assert [(use["slot"], use["id"], use["status"]) for use in content["uses"]] == [
        ("estimator", "estimators/grpo", "ok"),
        ("reward", "math/boxed", "ok"),
        ("datasource", "datasources/prompts", "ok"),
        ("generator", "generators/single_turn", "ok"),
        ("tracker[0]", "trackers/tensorboard", "ok"),
    ]
    assert (use(content, "reward")["distribution"], use(content, "reward")["version"]) == ("slime-reward-math", "0.3.1")


def test_flags_of_training_may_follow(install_reward: Any, run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    install_reward("math", "boxed")
    content = listed(capsys, run_file, "--reward", "exact_match", "--reward.extract", "last_number", code=0)
    assert use(content, "reward")["options"]["extract"] == "last_number"


def test_json_may_follow_the_flags(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--for", run_file, "--reward", "exact_match", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == 1


def test_several_rewards_are_listed_with_their_weights(
    install_reward: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_reward("math", "boxed")
    path = tmp_path / "several.toml"
    path.write_text(
        RUN.replace('[reward]\nname = "boxed"', "")
        + '[[reward.terms]]\nname = "boxed"\nweight = 0.7\n[[reward.terms]]\nname = "exact_match"\nweight = 0.3\n'
    )
    content = listed(capsys, str(path), code=0)
    assert [(u["slot"], u["id"], u["weight"]) for u in content["uses"] if u["kind"] == "reward"] == [
        ("reward[0]", "math/boxed", 0.7),
        ("reward[1]", "rewards/exact_match", 0.3),
    ]


@pytest.mark.parametrize(
    ("words", "status", "problem"),
    [
        ([], "missing", "reward 'boxed' is not installed"),
        (["--reward", "bad/x"], "broken", "No module named 'sympie'"),
        (["--reward", "exact_match", "--reward.ignor-case", "true"], "refused", "no option 'ignor_case'"),
    ],
)
def test_unusable_components_are_listed_with_the_cause(
    install_reward: Any,
    run_file: str,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    status: str,
    problem: str,
) -> None:
    install_reward("bad", "x", source="import sympie\n")
    content = listed(capsys, run_file, *words, code=1)
    assert use(content, "reward")["status"] == status
    assert problem in use(content, "reward")["problem"]
    assert use(content, "estimator")["problem"] is None


def test_a_clash_is_reported(install_reward: Any, run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    install_reward("math", "boxed")
    install_reward("rival", "boxed")
    assert use(listed(capsys, run_file, code=1), "reward")["status"] == "clash"
    assert use(listed(capsys, run_file, "--reward", "rival/boxed", code=0), "reward")["status"] == "ok"


def test_require_and_deny_of_the_run_apply(
    install_reward: Any, run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install_reward("math", "boxed")
    content = listed(capsys, run_file, "--plugins.require", "slime-reward-math>=9", code=1)
    assert "slime-reward-math>=9 (0.3.1 is installed)" in content["problems"][0]
    content = listed(capsys, run_file, "--plugins.deny", "math", code=1)
    assert "[plugins] deny names it" in use(content, "reward")["problem"]


def test_the_output_ends_with_all_problems(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--for", run_file]) == 1
    text = capsys.readouterr().out
    assert text.splitlines()[0].split() == ["SLOT", "COMPONENT", "VERSION", "STATUS", "FROM"]
    assert "1 problem\nreward: reward 'boxed' is not installed" in text


def test_an_unreadable_run_file_is_refused_as_in_training() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        run(["--for", "nowhere.toml"])
