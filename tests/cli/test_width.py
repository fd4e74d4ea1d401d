"""At 80 columns every text of the command line fits, and `--help WORD` searches all flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.cli.conftest import Slime, split

from slime.cli.help_topics import topics
from slime.config.flag_table import find_flag

TEXTS = [
    "--help",
    "train --help",
    "train --help --reward math --data-source curriculum",
    "train --help-megatron",
    "train --help-sglang",
    "train --help temperature",
    "train --help sft",
    "train --help memory",
    "completion --help",
    "doctor --help",
    "score --help",
    "launch --help",
    "eval --help",
    "convert --help",
    "view --help",
    "show --help",
    "compare --help",
    "plan --help",
    "cluster --help",
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
    assert "--eps-clip NUMBER" in text and "--clip-grad NUMBER" in text and "--lr NUMBER" not in text
    assert "--sglang-mem-fraction-static" in slime("train", "--help", "mem", "fraction").out
    assert "--reward.boxed" in slime("train", "--help", "boxed").out
    refused = slime("train", "--help", "temprature")
    assert refused.code == 2 and "no flag has 'temprature'" in refused.err
    assert "Did you mean temperature?" in refused.err
    text = slime("train", "--help", "seed").out
    assert text.count("  --seed N ") == text.count("  --rollout-seed N ") == 1 and "--rollout-shuffle" in text


def test_the_ten_flags_of_most_runs_come_first_with_types_choices_and_an_example_that_passes_its_checks(
    slime: Slime, described_model: Path, prompts: Path
) -> None:
    text = slime("train", "--help").out
    first, _, rest = text.partition("Every flag is also a key of the run file")
    named = re.findall(r"^  (--[\w-]+)", first, re.MULTILINE)
    assert (
        len(named) == 10 and "--num-rollout N" in first and "--lr NUMBER" in first and "--hf-checkpoint PATH" in first
    )
    assert "Installed: grpo, dr_grpo" in first and "Installed: exact_match, math" in first
    assert "VALUE" not in rest.partition("\n\n[")[2].partition("[cluster]")[0]
    example = first.partition("example:\n")[2].partition("\n\n")[0].replace("\\\n", " ").split()
    assert example.pop(0) == "slime" and "--dry-run" in example
    words = {"MODEL": str(described_model), "rows.jsonl": str(prompts), "1024": "8"}
    done = slime(*(words.get(word, word) for word in example), "--device", "cpu")
    assert done.code == 0 and "optimizer steps" in done.out, done.err


def test_help_with_a_subject_says_how_it_is_done_here(slime: Slime) -> None:
    for word in ("kl", "clip", "data", "model", "temperature"):
        assert "(docs/" in slime("train", "--help", word).out.partition("\n  --")[0]
    supervised = slime("train", "--help", "sft").out
    assert supervised.startswith("Supervised fine-tuning: --loss-type sft_loss") and "--label-key TEXT" in supervised
    preference = slime("train", "--help", "dpo").out
    assert preference.startswith("slime has no loss over pairs") and "--reward NAME" in preference
    # "endpoint" has these letters too.
    assert "endpoint" not in preference
    assert "learning_rate               TRL: --lr" in slime("train", "--help", "learning_rate").out
    assert slime("train", "--help", "learning", "rate").out.startswith("The learning rate and how it changes")


def test_every_topic_names_flags_and_pages_that_exist_and_no_word_twice() -> None:
    repository = Path(__file__).parents[2]
    words = [word for topic in topics() for word in topic.words]
    assert len(words) == len(set(words))
    for topic in topics():
        named = [*topic.flags, *re.findall(r"--([\w-]+)", topic.text)]
        assert [name for name in named if find_flag(name) is None and name not in ("resume", "dry-run")] == []
        assert (repository / topic.page).is_file()
