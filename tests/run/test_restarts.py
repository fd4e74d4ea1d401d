"""Which errors end a run with `--use-fault-tolerance`, and after how many restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.cli.checkpoint_choice import set_aside_later
from slime.config import RunConfig
from slime.config.options import ClusterOptions, RolloutOptions
from slime.config.weight_options import CheckpointOptions
from slime.errors import (
    CheckpointError,
    ClusterError,
    ClusterStartError,
    ConfigError,
    DataError,
    DeadlineError,
    DiskFullError,
    EngineError,
    EngineStartError,
    ErrorBudgetError,
    PluginContractError,
    PluginError,
    PreemptedError,
    ProcessDiedError,
    SlimeError,
    TrainerError,
    UnexpectedError,
    WeightSyncError,
)
from slime.observe.observer import RunObserver
from slime.run.checkpoint.read import TRAINER_PART, read_checkpoint
from slime.run.checkpoint.save import CheckpointWriter
from slime.run.supervise.losses import is_curable
from slime.run.supervise.restarts import newest_of_run, run_with_restarts


@pytest.mark.parametrize(
    "error",
    [
        ProcessDiedError("trainer rank 0 died"),
        ClusterError("raylet was killed"),
        EngineError("engine 0 died"),
        WeightSyncError("engine 0 does not answer"),
        DeadlineError("training: 1 of 2 processes had not answered"),
        UnexpectedError("training: loss.py:1: DistBackendError: NCCL communicator was aborted"),
    ],
)
def test_a_loss_is_curable(error: SlimeError) -> None:
    assert is_curable(error, first=True)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("bad"),
        DataError("bad row"),
        PluginError("the reward raises"),
        PluginContractError("3 of 4 rewards"),
        ErrorBudgetError("all samples failed"),
        DiskFullError("full"),
        TrainerError("the loss is nan"),
        CheckpointError("damaged"),
        UnexpectedError("training: loss.py:1: KeyError: 'x'"),
        PreemptedError("SIGTERM"),
    ],
)
def test_what_would_come_again_is_not(error: SlimeError) -> None:
    assert not is_curable(error, first=False)


@pytest.mark.parametrize("error", [EngineStartError("unknown option"), ClusterStartError("nothing answers there")])
def test_a_failed_start_is_curable_only_if_an_earlier_one_succeeded(error: SlimeError) -> None:
    assert not is_curable(error, first=True)
    assert is_curable(error, first=False)


class Attempts:
    """Raises the given errors, one in each attempt."""

    def __init__(self, *errors: SlimeError) -> None:
        self.errors = list(errors)
        self.begun = 0

    def __call__(self, config: RunConfig) -> None:
        del config
        self.begun += 1
        if self.errors:
            raise self.errors.pop(0)


def lost(count: int) -> list[SlimeError]:
    return [ProcessDiedError(f"rank {number} died\nits log") for number in range(count)]


def run(
    attempts: Attempts, folder: Path, *, stopped: bool = False, tolerant: bool | None = True, budget: int = 2
) -> None:
    config = RunConfig(cluster=ClusterOptions(use_fault_tolerance=tolerant, max_restarts=budget))
    run_with_restarts(attempts, config, RunObserver(config, folder), unless=lambda: stopped)


def test_the_run_begins_again_within_the_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempts = Attempts(*lost(2))
    run(attempts, tmp_path)
    assert attempts.begun == 3
    first, second = capsys.readouterr().out.splitlines()
    assert first == "restart 1 of 2, from where it began, 0 rollouts are repeated; cause: rank 0 died"
    assert second.startswith("restart 2 of 2")
    assert "restart 2 of 2" in (tmp_path / "logs" / "driver.log").read_text()


def test_the_last_error_lists_the_restarts_before_it(tmp_path: Path) -> None:
    attempts = Attempts(*lost(9))
    with pytest.raises(ProcessDiedError, match="rank 2 died") as caught:
        run(attempts, tmp_path)
    assert attempts.begun == 3
    assert caught.value.__notes__ == [
        "restarts before this (--max-restarts): 2\n  1. after: rank 0 died\n  2. after: rank 1 died"
    ]


def test_it_continues_from_the_newest_intact_checkpoint_of_the_run(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, RunConfig(), {})
    for done in (2, 4, 6, 8):
        temporary = writer.begin(done)
        (temporary / TRAINER_PART / "weights").write_text(str(done))
        writer.commit(temporary, {}, rollouts_done=done, weight_version=done, trained_at={})
    (tmp_path / "rollout_000006" / TRAINER_PART / "weights").write_text("x")
    found = newest_of_run(tmp_path / "rollout_000006")  # the one after it was abandoned
    assert found is not None and found.path == tmp_path / "rollout_000004"
    assert newest_of_run(tmp_path / "rollout_000012") is None


def test_a_damaged_checkpoint_that_was_skipped_is_not_the_latest_any_more(tmp_path: Path) -> None:
    config = RunConfig(
        rollout=RolloutOptions(num_rollout=6),
        cluster=ClusterOptions(use_fault_tolerance=True),
        checkpoint=CheckpointOptions(save=str(tmp_path / "saved")),
    )
    observer, writer = RunObserver(config, tmp_path), CheckpointWriter(tmp_path / "saved", config, {})
    loaded: list[str | None] = []

    def attempt(trying: RunConfig) -> None:
        loaded.append(trying.checkpoint.load)
        if trying.checkpoint.load is not None:
            assert (tmp_path / "saved" / "latest").read_text() == "rollout_000004\n", "nothing is changed before a load"
            set_aside_later(trying, read_checkpoint(Path(trying.checkpoint.load)))
            return
        for done in (2, 4):
            temporary = writer.begin(done)
            (temporary / TRAINER_PART / "weights").write_text(str(done))
            path = writer.commit(temporary, {}, rollouts_done=done, weight_version=done, trained_at={})
            observer.checkpoint_saved(done, path)
        (path / TRAINER_PART / "weights").write_text("x")
        raise ProcessDiedError("rank 0 died")

    run_with_restarts(attempt, config, observer, unless=lambda: False)
    assert loaded == [None, str(tmp_path / "saved" / "rollout_000002")]
    assert (tmp_path / "saved" / "latest").read_text() == "rollout_000002\n"


@pytest.mark.parametrize(
    ("stopped", "tolerant", "budget"), [(True, True, 2), (False, False, 2), (False, None, 2), (False, True, 0)]
)
def test_a_run_that_was_stopped_or_has_no_budget_ends(
    tmp_path: Path, stopped: bool, tolerant: bool | None, budget: int
) -> None:
    attempts = Attempts(*lost(9))
    with pytest.raises(ProcessDiedError) as caught:
        run(attempts, tmp_path, stopped=stopped, tolerant=tolerant, budget=budget)
    assert attempts.begun == 1
    assert not hasattr(caught.value, "__notes__")
