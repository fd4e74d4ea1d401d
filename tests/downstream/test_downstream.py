"""Third-party packages: built, used by a run, and missing in another."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
from tests.downstream.conftest import PACKAGES, Environment
from tests.support.tiny_models import make_tiny_model


def installed_here() -> list[str]:
    """Which of the packages are in the environment that runs the tests."""
    return [path.name for path in Path(sysconfig.get_path("purelib")).glob("*") if "brevity" in path.name]


@pytest.mark.slow
@pytest.mark.row("P5")
def test_installed_plugins_are_listed_and_keep_their_contracts(environment: Environment, sources: Path) -> None:
    assert installed_here() == []
    listing = json.loads(environment.slime("plugins", "--json").stdout)
    rows = {row["plugin"]: row for row in listing["plugins"]}
    for plugin, distribution, version, component in (
        ("brevity", "slime-reward-brevity", "0.3.0", "brevity/short"),
        ("median", "slime-estimator-median", "1.2.0", "median/median"),
    ):
        row = rows[plugin]
        assert (row["distribution"], row["version"], row["status"], row["built_in"]) == (
            distribution,
            version,
            "ok",
            False,
        )
        assert [provided["id"] for provided in row["provides"]] == [component]

    checked = environment.slime("plugins", "check", "brevity/short", "median/median")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "reward brevity/short" in checked.stdout and "estimator median/median" in checked.stdout

    done = environment.python("-m", "pytest", "-q", "--import-mode=importlib", *PACKAGES, cwd=sources)
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(700)
@pytest.mark.row("P4")
def test_a_run_selects_them_by_name_and_is_refused_once_they_are_gone(environment: Environment, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3", seed=0)
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"q{i:03d}", "label": "a"}) + "\n" for i in range(8)))
    command = ["train", "--run-name", "run", "--hf-checkpoint", str(model), "--prompt-data", str(data)]
    command += ["--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"]
    command += ["--rollout-max-response-len", "8", "--sglang-max-total-tokens", "16384", "--lr", "1e-3"]
    command += ["--advantage-estimator", "median/median", "--reward", "brevity/short", "--reward.limit", "16"]
    done = environment.slime(*command, "--save", "ckpt", cwd=tmp_path, timeout_s=450)
    assert done.returncode == 0, done.stdout + done.stderr

    run = tmp_path / "outputs" / "run"
    rows = [json.loads(line) for line in (run / "rollouts" / "000001.jsonl").read_text().splitlines()]
    assert [row["reward"]["score"] for row in rows] == [1 - len(row["response"]) / 16 for row in rows]
    assert len({row["reward"]["score"] for row in rows}) > 1
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(step.get("train/grad_norm", 0) > 1e-4 for step in steps)

    used = json.loads((run / "plugins.json").read_text())["used"]
    assert (used["reward"]["id"], used["reward"]["version"], used["reward"]["options"]) == (
        "brevity/short",
        "0.3.0",
        {"limit": 16},
    )
    assert (used["estimator"]["id"], used["estimator"]["version"]) == ("median/median", "1.2.0")
    for slot in ("reward", "estimator"):
        assert len(used[slot]["source"]["hash"]) == 64, used[slot]

    environment.pip("uninstall", "-y", "slime-reward-brevity")
    for more in ([], ["--load", "ckpt", "--num-rollout", "3"]):
        refused = environment.slime(*command, *more, cwd=tmp_path)
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert "reward 'brevity/short' is not installed" in refused.stderr
        assert "slime-reward-*" in refused.stderr
        assert "Traceback" not in refused.stderr

    # A different reward would make it a different run: the checkpoint records the one it was trained with.
    words = [
        word if word != "brevity/short" else "exact_match" for word in command if word not in ("--reward.limit", "16")
    ]
    other = environment.slime(*words, "--load", "ckpt", "--num-rollout", "3", cwd=tmp_path)
    assert other.returncode == 2, other.stdout + other.stderr
    assert "brevity/short of slime-reward-brevity 0.3.0, which is missing" in other.stderr
