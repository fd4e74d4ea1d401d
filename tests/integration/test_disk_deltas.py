"""A run whose weights go over a disk as deltas computes what one computes that writes all of them each time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import SlimeRun
from tests.integration.test_engine_recovery import scheduler_of
from tests.integration.test_restarts import assert_complete, held_run

from slime.observe.metrics import depends_on_time, read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
Start = Callable[..., SlimeRun]

DISK = ("--update-weight-transport", "disk", "--check-weight-update-equal")
DELTA = ("--disk-delta", "--disk-delta-full-every", "3")


@pytest.mark.row("N7")
def test_a_run_with_deltas_equals_one_without(slime_train: Start) -> None:
    same = (*DISK, "--deterministic", "--num-rollout", "6", "--rollout-num-gpus", "2")
    whole = slime_train(*same, name="whole")
    assert whole.wait() == 0, whole.output
    delta = slime_train(*same, *DELTA, name="delta")
    assert delta.wait() == 0, delta.output
    for number in range(6):
        samples, expected = (run.run_dir / "rollouts" / f"{number:06d}.jsonl" for run in (delta, whole))
        assert samples.read_bytes() == expected.read_bytes(), number
    for row, other in zip(read_metrics(delta.run_dir), read_metrics(whole.run_dir), strict=True):
        computed = [name for name in other if not depends_on_time(name) and name != "synced_bytes"]
        assert {name: row[name] for name in computed} == {name: other[name] for name in computed}
        assert 0.5 < row["perf/sync/changed_share"] <= 1
        assert row["train/grad_norm"] > 1e-3 and row["train/logprob_gap_max"] < 1e-4
    assert not list((delta.run_dir / "weights").glob("*"))


def test_an_engine_that_was_killed_gets_the_newest_weights_again(slime_train: Start, tmp_path: Path) -> None:
    flags = (*DISK, *DELTA, "--rollout-num-gpus", "2", "--use-fault-tolerance", "--entropy-coef", "0.1")
    run = held_run(slime_train, tmp_path, *flags)
    run.wait_for_output(r"\b2/4")
    scheduler_of(run, 1).kill()
    run.wait_for_output(r"engine 1 is back after")
    (tmp_path / "go on").touch()
    assert run.wait() == 0, run.output
    assert_complete(run)
    rows = run.steps()
    assert sum(row.get("restarts/engine", 0) for row in rows) == 1
    assert all(row["train/grad_norm"] > 1e-3 and row["train/logprob_gap_max"] < 1e-3 for row in rows)
