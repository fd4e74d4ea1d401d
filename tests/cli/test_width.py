"""At 80 columns every text of the command line fits, and `--help WORD` searches all flags."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Slime, split

TEXTS = [
    "--help",
    "train --help",
    "train --help --reward math --data-source curriculum",
    "train --help-megatron",
    "train --help-sglang",
    "train --help temperature",
    "eval --help",
    "convert --help",
    "view --help",
    "show --help",
    "compare --help",
    "plugins --help",
    "plugins",
    "plugins --verbose",
    "plugins show math",
    "plugins show grpo",
    "plugins show prompts",
]


@pytest.fixture
def a_run(described_model: Path, prompts: Path) -> list[str]:
    """The command line of a run."""
    words = "--device cpu --num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 2 --lr 1e-4"
    words += " --rollout-max-response-len 8 --advantage-estimator grpo --reward math --save-interval 1"
    return ["--hf-checkpoint", str(described_model), "--prompt-data", str(prompts), *split(words)]


def too_long(text: str) -> list[str]:
    """Lines over 80 characters, but for one word, such as a path, that cannot be wrapped."""
    return [line for line in text.splitlines() if len(line) > 80 and len(line.split()) > 1]


@pytest.mark.parametrize("command", TEXTS)
def test_every_text_fits_into_80_columns(slime: Slime, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = slime(*command.split())
    assert done.code == 0 and done.out
    assert too_long(done.out) == []


def test_the_plan_of_a_run_fits_into_80_columns(
    slime: Slime, a_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = slime("train", *a_run, "--dry-run")
    assert done.code == 0, done.err
    assert "optimizer steps" in done.out and too_long(done.out) == []


def test_the_plan_is_not_wrapped_in_a_pipe(slime: Slime, a_run: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert too_long(slime("train", *a_run, "--dry-run").out)


def test_help_with_words_searches_the_flags_of_slime_megatron_sglang_and_components(slime: Slime) -> None:
    text = slime("train", "--help", "clip").out
    assert "--eps-clip VALUE" in text and "--clip-grad VALUE" in text and "--lr VALUE" not in text
    assert "--sglang-mem-fraction-static" in slime("train", "--help", "mem", "fraction").out
    assert "--reward.boxed" in slime("train", "--help", "boxed").out
    assert "no flag has 'zzz'" in slime("train", "--help", "zzz").out


def test_the_search_loads_no_torch() -> None:
    code = (
        "import sys; from slime.cli.main import main; main(['train', '--help', 'clip']);"
        " sys.exit(' '.join(sorted({'torch', 'ray', 'sglang', 'megatron'} & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
