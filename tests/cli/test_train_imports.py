"""The imports of light commands and of checking a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import split

HEAVY = ("torch", "ray", "sglang", "megatron", "transformers")
ROOT = Path(__file__).parents[2]


def imported(*commands: list[str], code: int = 0) -> set[str]:
    """Top-level modules that one process has imported when it has run each `slime WORDS`."""
    script = (
        "import json, sys\nfrom slime.cli.main import main\n"
        "codes = {main(words) for words in json.loads(sys.argv[1])}\n"
        "print('\\nMODULES', *codes, *{name.partition('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", script, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    label, got, *modules = done.stdout.splitlines()[-1].split()
    assert (label, int(got)) == ("MODULES", code), done.stderr
    return set(modules)


def test_short_commands_import_only_the_standard_library() -> None:
    assert not imported(["--help"], ["--version"]) & {*HEAVY, "pydantic", "pluggy", "numpy", "rich"}


@pytest.mark.slow
def test_helps_searches_and_the_list_of_plugins_import_no_engine() -> None:
    helps = [["train", word] for word in ("--help", "--help-megatron", "--help-sglang")]
    assert not imported(*helps, ["train", "--help", "clip"], ["plugins"]) & set(HEAVY)


@pytest.mark.slow
def test_a_run_is_checked_without_engines(described_model: Path, prompts: Path) -> None:
    words = ["train", "--dry-run", "--hf-checkpoint", str(described_model), "--prompt-data", str(prompts)]
    words += split("--num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 8")
    words += split("--advantage-estimator grpo --reward exact_match --lr 1e-4 --tensor-model-parallel-size 1")
    assert not imported([*words, "--sglang-log-level", "info", "--apply-chat-template"]) & set(HEAVY)
    assert not imported([*words, "--reward", "nope"], code=2) & set(HEAVY)


@pytest.mark.slow
def test_the_scripts_run_the_command(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[cluster]\ncolocate = true\n")
    for script, shares in (("train.py", False), ("train_async.py", True)):
        command = [sys.executable, str(ROOT / script), *(["run.toml"] if shares else [])]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 2
        assert done.stderr.startswith("slime: error: ")
        assert ("does not support colocation" in done.stderr) is shares
