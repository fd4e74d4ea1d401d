"""Which old log-probs the importance ratio uses."""

from __future__ import annotations

import pytest
from tests.config.conftest import Load

CASES = [
    ((), False),
    (("--async",), True),
    (("--async", "--no-use-rollout-logprobs"), False),
    (("--use-rollout-logprobs",), True),
    (("--sampling-filter", "some"), True),
    (("--sampling-filter", "some", "--no-use-rollout-logprobs"), False),
    (("--buffer-filter", "some"), True),
    (("--over-sampling-batch-size", "48"), True),
    (("--over-sampling-batch-size", "32"), False),
    (("--max-reuse", "1"), True),
    (("--async", "--use-tis"), False),  # the correction makes up for the difference
    (("--async", "--off-policy-correction", "mask"), False),
    (("--async", "--off-policy-sequence-delta", "0.1"), True),
]


@pytest.mark.parametrize(("words", "by_engine"), CASES)
def test_engine_log_probs_are_the_default_if_samples_may_be_stale(
    load: Load, words: tuple[str, ...], by_engine: bool
) -> None:
    assert load(*words).algorithm.use_rollout_logprobs is by_engine
