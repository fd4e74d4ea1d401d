"""Custom functions over a finished batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from slime.errors import PluginContractError, PluginError
from slime.rollout.boundaries import BatchFunction
from slime.types import Group, Sample, Status


def batch() -> list[Group]:
    return [
        Group(0, [Sample(reward=1.0, status=Status.COMPLETED), Sample(status=Status.FAILED)]),
        Group(1, [Sample(reward=0.0, status=Status.TRUNCATED), Sample(reward=2.0, status=Status.COMPLETED)]),
    ]


def test_a_sample_filter_marks_samples_and_cannot_remove_any() -> None:
    def mark(groups: list[list[Sample]]) -> None:
        groups[1][0].remove_sample = True
        groups.pop()
        groups[0].clear()

    groups = batch()
    BatchFunction(mark, "--filter f.py").mark_removed(groups)
    assert [[s.remove_sample for s in g.samples] for g in groups] == [[False, False], [True, False]]


def test_a_sample_filter_that_removes_everything_is_refused() -> None:
    def remove_all(groups: list[list[Sample]]) -> None:
        for samples in groups:
            for sample in samples:
                sample.remove_sample = True

    with pytest.raises(PluginError, match=r"^--rollout-sample-filter-path f.py removed all 3 samples of the batch"):
        BatchFunction(remove_all, "--rollout-sample-filter-path f.py").mark_removed(batch())


def test_post_processing_gets_trainable_samples_in_order() -> None:
    groups = batch()
    answer = BatchFunction(
        lambda samples: ([s.reward for s in samples], 10 * np.asarray([s.reward_value for s in samples])), "--post f.py"
    ).rewards(groups)
    assert answer == (1.0, [10.0, 0.0, 20.0])
    assert [s.reward for g in groups for s in g.samples] == [1.0, None, 0.0, 2.0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([1.0, 2.0, 3.0], r"returned a list, expected a pair \(raw rewards, rewards\)"),
        (([1, 2, 3], [1, 2]), "returned 2 rewards for 3 samples, expected one each"),
        (([1], [1, 2, 3]), "returned 1 raw rewards for 3 samples"),
        (([1, 2, 3], [1, math.nan, 3]), "returned rewards with nan for sample 1, expected a finite number"),
        (([1, 2, 3], [1, 2, "3"]), "returned rewards with '3' for sample 2"),
        ((0.5, [1, 2, 3]), "returned raw rewards that are a float, expected a list"),
    ],
)
def test_an_invalid_result_is_refused_with_the_functions_name(answer: Any, words: str) -> None:
    with pytest.raises(PluginContractError, match=f"^--post f.py {words}"):
        BatchFunction(lambda _: answer, "--post f.py").rewards(batch())


def test_a_function_that_raises_is_named() -> None:
    def fail(_: object) -> None:
        raise KeyError("weights")

    with pytest.raises(PluginError, match=r"^--filter a\.py: \S+test_post_process\.py:\d+: KeyError: 'weights'"):
        BatchFunction(fail, "--filter a.py").mark_removed(batch())
    with pytest.raises(PluginError, match=r"^--post b\.py: \S+test_post_process\.py:\d+: KeyError: 'weights'"):
        BatchFunction(fail, "--post b.py").rewards(batch())
