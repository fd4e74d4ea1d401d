"""Real runs that generate in several rollout workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.integration.conftest import SlimeRun
from tests.integration.test_runs import assert_same_bits

Start = Callable[..., SlimeRun]


@pytest.mark.slow
def test_two_workers_generate_the_same_samples_as_none(slime_train: Start) -> None:
    same = ("--rollout-shuffle", "--deterministic", "--use-tis", "--num-rollout", "3")
    one = slime_train(*same, "--save", "one-ckpt", name="one")
    assert one.wait() == 0, one.output
    two = slime_train(*same, "--save", "two-ckpt", "--num-rollout-workers", "2", name="two")
    assert two.wait() == 0, two.output
    for number in (0, 1):
        assert (two.run_dir / "logs" / f"rollout_worker-{number}.log").exists()
    assert_same_bits(one, [two] * 3, "one-ckpt", two, "two-ckpt")
    assert two.left_over() == []
