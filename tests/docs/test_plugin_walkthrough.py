"""The walk-through of docs/plugins.md, done as it is written there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "plugins.md"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the walk-through's package installed into it."""
    package = tmp_path_factory.mktemp("package")
    for name, code in re.findall(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(code)
    assert (package / "slime_reward_length" / "impl.py").is_file()
    target = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(target),
    ]
    subprocess.run([*command, str(package)], check=True, timeout=120)
    return target


def slime(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("slime")), *words]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def test_the_installed_plugin_is_listed(site: Path) -> None:
    rows = json.loads(slime(site, "plugins", "--json").stdout)["plugins"]
    [row] = [row for row in rows if row["distribution"] == "slime-reward-length"]
    assert row["status"] == "ok"


def test_its_options_are_checked_and_resolved(site: Path, tmp_path: Path) -> None:
    from tests.support.tiny_models import make_tiny_model

    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "a", "label": "b"}\n')
    words = ["train", "--dry-run", "--hf-checkpoint", str(make_tiny_model(tmp_path / "m", "qwen3", seed=0))]
    words += [
        "--prompt-data",
        str(data),
        "--num-rollout",
        "1",
        "--rollout-batch-size",
        "1",
        "--output-dir",
        str(tmp_path),
    ]
    words += [
        "--rollout-max-response-len",
        "8",
        "--n-samples-per-prompt",
        "2",
        "--advantage-estimator",
        "grpo",
        "--reward",
        "length",
    ]
    done = slime(site, *words, "--reward.limit", "50")
    assert done.returncode == 0, done.stderr
    assert "length/length" in done.stdout
    assert "limit=50" in done.stdout
    wrong = slime(site, *words, "--reward.limt", "50")
    assert wrong.returncode == 2
    assert "limit" in wrong.stderr
