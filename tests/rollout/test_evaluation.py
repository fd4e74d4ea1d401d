"""The metrics of one held-out set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.prompt_files import Letters, write_rows

from slime.config import RunConfig
from slime.config.eval_options import EvalOptions
from slime.config.eval_sets import EvalSetSettings, eval_sets
from slime.config.weight_options import CheckpointOptions
from slime.errors import DataError, SlimeError
from slime.rollout.evaluation import attempts_of, load_prompts, set_metrics
from slime.types import Sample, Status


def settings(n_samples: int = 1, threshold: float = 1.0) -> EvalSetSettings:
    options = EvalOptions(
        eval_prompt_data=[("sums", "f")], n_samples_per_eval_prompt=n_samples, eval_pass_threshold=threshold
    )
    return eval_sets(RunConfig(evaluation=options))[0]


def sample(status: Status, reward: float | None = None, rollout: int | None = None, **more: object) -> Sample:
    made = Sample(tokens=[1, 2], response_length=1, status=status, reward=reward, rollout_id=rollout)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def metrics_of(prompts: list[list[Sample]], one: EvalSetSettings) -> dict[str, float]:
    attempts = [list(attempts_of(samples, one.pass_threshold).values()) for samples in prompts]
    return set_metrics(one, attempts, [sample for samples in prompts for sample in samples], seed=1)


def test_lost_and_unscored_samples_have_reward_0_and_are_counted() -> None:
    samples = [
        [sample(Status.COMPLETED, 1.0)],
        [sample(Status.TRUNCATED, 0.5)],
        [sample(Status.FAILED)],
        [sample(Status.ABORTED)],
        [sample(Status.FAILED, 1.0)],  # scored, and lost afterwards
        [sample(Status.COMPLETED)],
    ]
    metrics = metrics_of(samples, settings())
    assert metrics["eval/sums"] == pytest.approx(1.5 / 6)
    assert (metrics["eval/sums/samples"], metrics["eval/sums/failed"], metrics["eval/sums/aborted"]) == (6, 2, 1)
    assert metrics["eval/sums/unscored"] == 1
    assert metrics["eval/sums/pass@1"] == pytest.approx(1 / 6)
    assert metrics["eval/sums/truncated_ratio"] == pytest.approx(1 / 3)


def test_a_set_without_any_answer_is_an_error() -> None:
    with pytest.raises(SlimeError, match="evaluation set sums: none of its 2 samples has a reward: 2x failed"):
        metrics_of([[sample(Status.FAILED)], [sample(Status.FAILED)]], settings())


def test_a_set_without_any_reward_is_an_error() -> None:
    with pytest.raises(SlimeError, match="none of its 1 samples has a reward: no reward scored them"):
        metrics_of([[sample(Status.COMPLETED)]], settings())


def test_several_samples_of_one_rollout_are_one_attempt() -> None:
    together = [sample(Status.COMPLETED, 1.0, rollout=7), sample(Status.COMPLETED, 0.0, rollout=7)]
    apart = [sample(Status.COMPLETED, 1.0, rollout=8)]
    attempts = attempts_of([*together, *apart], threshold=0.6)
    assert {key: (one.reward, one.passed) for key, one in attempts.items()} == {7: (0.5, False), 8: (1.0, True)}


def test_an_attempt_with_a_lost_sample_never_passes() -> None:
    samples = [sample(Status.COMPLETED, 1.0, rollout=7), sample(Status.FAILED, rollout=7)]
    assert attempts_of(samples, threshold=-1.0)[7].passed is False
    assert attempts_of([sample(Status.FAILED, rollout=1)], threshold=-1.0)[1].passed is False


def test_the_threshold_decides_what_passes() -> None:
    prompts = [[sample(Status.COMPLETED, value, rollout=n) for n, value in enumerate((0.4, 0.6))] for _ in range(2)]
    assert metrics_of(prompts, settings(2, threshold=0.5))["eval/sums/pass@1"] == 0.5
    assert metrics_of(prompts, settings(2, threshold=0.5))["eval/sums/pass@2"] == 1.0
    assert metrics_of(prompts, settings(2))["eval/sums/pass@2"] == 0.0


def test_rounding_does_not_fail_the_threshold() -> None:
    assert 0.7 + 0.2 + 0.1 < 1.0
    assert attempts_of([sample(Status.COMPLETED, 0.7 + 0.2 + 0.1, rollout=0)], threshold=1.0)[0].passed


def test_several_weight_versions_in_an_evaluation_are_reported() -> None:
    one = [[sample(Status.COMPLETED, 1.0, weight_versions=["3"])], [sample(Status.COMPLETED, 0.0)]]
    assert metrics_of(one, settings())["eval/sums/weight_version"] == 3
    two = [*one, [sample(Status.COMPLETED, 1.0, weight_versions=["3", "4"])]]
    assert metrics_of(two, settings())["eval/sums/weight_versions"] == 2
    assert "eval/sums/weight_version" not in metrics_of(two, settings())


def test_parts_of_rewards_are_averaged_by_name() -> None:
    made = sample(Status.COMPLETED)
    made.reward = {"score": 1.0, "format": 0.25}
    assert metrics_of([[made]], settings())["eval/sums/reward/format"] == 0.25


def test_a_prompt_and_a_response_must_fit_the_models_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 32}')
    path = write_rows(tmp_path, "jsonl", [{"prompt": "x" * 25, "label": ""}])
    config = RunConfig(checkpoint=CheckpointOptions(hf_checkpoint=str(tmp_path)))
    fits = replace(settings(), path=str(path), max_response_len=7)
    assert [len(sample.tokens) for sample in load_prompts(fits, config, Letters())] == [25]
    with pytest.raises(DataError, match=r"25 tokens, expected at most 24\. .*--eval-max-response-len"):
        load_prompts(replace(fits, max_response_len=8), config, Letters())
