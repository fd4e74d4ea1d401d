"""The imports of light commands and of checking a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import split

HEAVY = ("torch", "ray", "sglang", "megatron", "transformers")
ROOT = Path(__file__).parents[2]


def imported(*words: str, code: int = 0) -> set[str]:
    """Top-level modules that `slime WORDS` has imported when it ends."""
    script = (
        "import sys\nfrom slime.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "print('\\nMODULES', code, *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=240, check=True
    )
    label, got, *modules = done.stdout.splitlines()[-1].split()
    assert (label, int(got)) == ("MODULES", code), done.stderr
    return set(modules)


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_short_commands_import_only_the_standard_library(word: str) -> None:
    assert not imported(word) & {*HEAVY, "pydantic", "pluggy", "numpy", "rich"}


@pytest.mark.slow
@pytest.mark.parametrize("word", ["--help", "--help-megatron", "--help-sglang"])
def test_the_help_of_training_imports_no_engine(word: str) -> None:
    assert not imported("train", word) & set(HEAVY)


def test_plugins_are_listed_without_engines() -> None:
    assert not imported("plugins") & set(HEAVY)


@pytest.mark.slow
def test_a_run_is_checked_without_engines(described_model: Path, prompts: Path) -> None:
    words = ["train", "--dry-run", "--hf-checkpoint", str(described_model), "--prompt-data", str(prompts)]
    words += split("--num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 8")
    words += split("--advantage-estimator grpo --reward exact_match --lr 1e-4 --tensor-model-parallel-size 1")
    assert not imported(*words, "--sglang-log-level", "info", "--apply-chat-template") & set(HEAVY)
    assert not imported(*words, "--reward", "nope", code=2) & set(HEAVY)


@pytest.mark.slow
@pytest.mark.parametrize(("script", "more"), [("train.py", []), ("train_async.py", ["--colocate"])])
def test_the_scripts_run_the_command(script: str, more: list[str]) -> None:
    done = subprocess.run([sys.executable, str(ROOT / script), *more], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert done.stderr.startswith("slime: error: ")
    assert ("does not support colocation" in done.stderr) is bool(more)


@pytest.mark.slow
def test_train_async_takes_a_run_file(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text("[rollout]\nnum-rollouts = 2\n")
    command = [sys.executable, str(ROOT / "train_async.py"), str(run_file), "--colocate"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "did you mean" in done.stderr.lower() and "num-rollouts" in done.stderr
