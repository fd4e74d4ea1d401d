"""The last lines of a run that was interrupted, or has failed, say how to continue it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from slime.cli.main import main
from slime.cli.train import how_to_continue
from slime.config import RunConfig
from slime.config.weight_options import CheckpointOptions
from slime.errors import SlimeError

STARTED = time.localtime(1_000_000)
WORDS = ["run.toml", "--load", "old runs", "--load=x", "--run-name", "my run"]
RUN = Path("outputs/my run")


def note(**options: Any) -> str:
    return how_to_continue(RunConfig(checkpoint=CheckpointOptions(**options)), RUN, WORDS, since=STARTED)


def saved(folder: Path, *, at: float) -> str:
    """A folder whose newest checkpoint was saved at that time."""
    (folder / "latest").write_text("rollout_000010\n")
    os.utime(folder / "latest", (at, at))
    return str(folder)


def test_the_command_continues_from_the_newest_checkpoint(tmp_path: Path) -> None:
    save = saved(tmp_path, at=1_000_100)
    assert note(save=save) == (
        "to continue from the checkpoint rollout_000010:\n  slime train --resume 'outputs/my run'"
    )


def test_the_command_asks_for_secrets_again(tmp_path: Path) -> None:
    words = ["--lr=1", "--reward.api-key", "k1", "--sglang-api-key=k2", "--reward.url", "http://me:k3@judge/"]
    config = RunConfig(checkpoint=CheckpointOptions(save=saved(tmp_path, at=1_000_100)))
    _, _, command = how_to_continue(config, RUN, words, since=STARTED).partition("\n")
    assert command == (
        "  slime train --resume 'outputs/my run' '--reward.api-key=<secret>' '--sglang-api-key=<secret>'"
        " '--reward.url=http://<secret>@judge/'"
    )


def test_a_resumed_run_without_a_new_checkpoint_continues_as_it_began(tmp_path: Path) -> None:
    save = saved(tmp_path, at=999_000)
    assert note(save=save, load="old") == ("no new checkpoint was written: the same command continues from old again")


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    assert note(save=str(tmp_path)) == "no checkpoint had been written yet, so the run can only be started again"
    assert note() == "the run wrote no checkpoint to continue from: --save-interval N writes one every N rollouts"


@pytest.mark.parametrize(
    ("raised", "code", "first"), [(KeyboardInterrupt(), 130, "interrupted"), (SlimeError("lost"), 1, "error: lost")]
)
def test_the_note_is_printed_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: BaseException, code: int, first: str
) -> None:
    def fail(_: object) -> int:
        raised.add_note("to continue: ...")
        raise raised

    monkeypatch.setattr("slime.cli.train.run", fail)
    assert main(["train"]) == code
    assert capsys.readouterr().err == f"slime: {first}\nslime: to continue: ...\n"
