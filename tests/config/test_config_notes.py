"""What works, but does less than its options say, is noted."""

from __future__ import annotations

import pytest
from tests.config.conftest import GOOD

from slime.config import config_notes, read_config, resolve


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        ("--async --async-buffer-size 2 --update-weights-interval 2 --max-staleness 3", None),
        (
            "--async --async-buffer-size 2 --update-weights-interval 2 --max-staleness 2",
            "--max-staleness 2 makes generation wait for the trainer: --async-buffer-size 2 rollouts ahead, with"
            " weights up to 1 rollouts old, would be 2 + 1 = 3 rollouts stale",
        ),
        (
            "--async --over-sampling-batch-size 64 --partial-rollout --max-staleness 1",
            "--partial-rollout continues almost nothing with --max-staleness 1: a response is continued at least"
            " 1 rollouts ahead + 1 after its first weights. Use at least --max-staleness 2",
        ),
        ("--async --over-sampling-batch-size 64 --partial-rollout --max-staleness 2", None),
        (
            "--over-sampling-batch-size 64 --partial-rollout --max-staleness 0",
            "--partial-rollout continues almost nothing with --max-staleness 0: a response is continued at least"
            " 0 rollouts ahead + 1 after its first weights. Use at least --max-staleness 1",
        ),
    ],
)
def test_a_bound_that_slows_a_run_down_is_noted_with_the_numbers(words: str, noted: str | None) -> None:
    assert config_notes(read_config([*GOOD, *words.split()])) == ([] if noted is None else [noted])


def test_drafts_that_are_not_trained_are_noted() -> None:
    words = [*GOOD, "--device", "cuda", "--sglang-speculative-algorithm", "NEXTN"]
    (note,) = config_notes(read_config(words))
    assert "the further the policy moves, the fewer drafts are accepted. --enable-mtp-training trains" in note


def test_an_evaluation_interval_without_sets_is_ignored_with_a_note() -> None:
    config = resolve(read_config([*GOOD, "--eval-interval", "5"]))
    assert config.evaluation.eval_interval is None
    assert config_notes(read_config([*GOOD, "--eval-interval", "5"])) == [
        "--eval-interval has no effect: there are no evaluation sets (--eval-prompt-data)"
    ]


@pytest.mark.parametrize(
    "stated", ["--ref-update-interval 5", "--ref-load folder", "--kl-loss-type k1", "--kl-reward-type k3"]
)
def test_options_of_an_unused_reference_are_noted(stated: str) -> None:
    (note,) = config_notes(read_config([*GOOD, *stated.split()]))
    assert note.startswith(f"{stated} has no effect unless the estimator needs a reference")
    assert config_notes(read_config([*GOOD, *stated.split(), "--kl-coef", "0.1"])) == []


def test_the_kl_loss_does_not_read_the_kl_type_of_the_reward() -> None:
    asked = [*GOOD, "--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k1", "--ref-load", "folder"]
    assert config_notes(read_config(asked)) == []
    (note,) = config_notes(read_config([*asked, "--kl-reward-type", "k3"]))
    assert "--kl-reward-type k3 has no effect" in note


@pytest.mark.parametrize(("steps", "noted"), [("9", 0), ("10", 1), ("11", 1)])
def test_a_policy_that_is_never_trained_is_noted(steps: str, noted: int) -> None:
    notes = config_notes(read_config([*GOOD, "--num-critic-only-steps", steps, "--num-rollout", "10"]))
    assert [note for note in notes if "leaves the policy untrained" in note] == notes and len(notes) == noted
