"""SIGTERM to a run that saves checkpoints."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slime.config import RunConfig
from slime.config.weight_options import CheckpointOptions
from slime.errors import PluginError, PreemptedError, ProcessDiedError, SlimeError
from slime.run.preemption import Preemption

#: a run whose main thread waits; it ends after its step if the step ends
STEP = """
import signal, subprocess, time
from pathlib import Path
from slime.config import RunConfig
from slime.config.weight_options import CheckpointOptions
from slime.run.preemption import Preemption
from slime.run.signals import ending_on_signals

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started this in the background
child = subprocess.Popen(["sleep", "600"])
options = CheckpointOptions(save="saved", preemption_timeout_s={timeout_s})
preemption = Preemption(RunConfig(checkpoint=options), Path("outputs/run"))
with ending_on_signals(preemption) as interrupted, preemption.accepted():
    print(child.pid, flush=True)
    while not (preemption.asked and {step_ends}):
        time.sleep(0.05)
print("interrupted" if interrupted.is_set() else "saved", flush=True)
preemption.close()
child.kill()
"""


def start(**values: object) -> subprocess.Popen[str]:
    program = [sys.executable, "-c", STEP.format(**values)]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_step_ends_and_more_signals_change_nothing() -> None:
    with start(timeout_s=100, step_ends="input() == ''") as run:
        assert run.stdin is not None and run.stdout is not None and run.stderr is not None
        run.stdout.readline()
        run.terminate()
        assert run.stderr.readline() == (
            "slime: SIGTERM: saving a checkpoint after this step, then ending, within 100 s\n"
        )
        run.terminate()
        assert run.stderr.readline().startswith("slime: SIGTERM again: still ending the run")
        run.stdin.write("\n")
        run.stdin.flush()
        assert run.wait(60) == 0
        assert run.stdout.read() == "saved\n"


def test_ctrl_c_ends_it_without_waiting() -> None:
    with start(timeout_s=100, step_ends=False) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.readline()
        run.terminate()
        run.stderr.readline()
        run.send_signal(signal.SIGINT)
        assert run.stderr.readline().startswith("slime: interrupted: ending the run")
        assert run.wait(60) != 0


@pytest.mark.slow
def test_at_the_end_of_the_time_everything_is_killed() -> None:
    with start(timeout_s=0.5, step_ends=False) as run:
        assert run.stdout is not None and run.stderr is not None
        child = psutil.Process(int(run.stdout.readline()))
        run.terminate()
        assert run.wait(60) == 143
        child.wait(60)
        said = run.stderr.read()
        assert "ended at once, 0.5 s after SIGTERM" in said
        assert said.endswith("to continue:\n  slime train --resume outputs/run\n")


@pytest.fixture
def preemption() -> Iterator[Preemption]:
    options = CheckpointOptions(save="saved", preemption_timeout_s=1000)
    made = Preemption(RunConfig(checkpoint=options), Path("outputs/run"))
    yield made
    made.close()


def test_it_is_accepted_from_the_loop_of_a_run_that_saves_on(preemption: Preemption) -> None:
    assert not preemption.accepts
    with preemption.accepted():
        assert preemption.accepts and not preemption.asked
    assert preemption.accepts and not preemption.asked  # while processes end, and start again
    without = Preemption(RunConfig(), Path("outputs/run"))
    with without.accepted():
        assert not without.accepts


def test_a_run_that_starts_again_ends_at_once(preemption: Preemption) -> None:
    with preemption.accepted():
        pass
    assert preemption.ask() == "slime: SIGTERM: ending the run, within 1000 s"
    with pytest.raises(PreemptedError, match="while the run started again"):
        preemption.check()


def test_what_is_lost_after_sigterm_is_told_as_the_end_that_was_asked_for(preemption: Preemption) -> None:
    def lose(error: SlimeError) -> None:
        with preemption.explaining():
            raise error

    with pytest.raises(ProcessDiedError):
        lose(ProcessDiedError("the rank died"))
    with preemption.accepted():
        preemption.ask()
    with pytest.raises(PreemptedError, match=r"what was saved before is complete. Before the end: the rank died$"):
        lose(ProcessDiedError("the rank died\nits log"))
    with pytest.raises(PluginError):  # which would come again
        lose(PluginError("the reward raises"))
    with pytest.raises(PreemptedError, match=r"^preempted: after 3 rollouts$"):
        lose(PreemptedError("preempted: after 3 rollouts"))


def test_a_step_that_does_not_end_is_given_up_in_time_for_an_orderly_end(
    preemption: Preemption, monkeypatch: pytest.MonkeyPatch
) -> None:
    preemption.check()
    now = time.monotonic()
    with preemption.accepted():
        preemption.ask()
        monkeypatch.setattr(time, "monotonic", lambda: now + 984)
        preemption.check()
        monkeypatch.setattr(time, "monotonic", lambda: now + 986)
        with pytest.raises(PreemptedError, match="the step or an evaluation did not end in time after SIGTERM"):
            preemption.check()
