"""However a run ends, it leaves no processes and prints the reason.

`test_restarts.py` terminates only the driver of a run, which saves then, and kills a rank of another.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest
from tests.integration.conftest import SlimeRun, command_of, processes_marked

pytestmark = [pytest.mark.engine, pytest.mark.slow]
Start = Callable[..., SlimeRun]


def test_a_terminated_run_shuts_down_cleanly(slime_train: Start) -> None:
    """Every process gets SIGTERM, as from a service manager. `test_nobody_gets_in.py` interrupts a run."""
    run = slime_train("--num-rollout", "100000")
    run.wait_for_output(r"\b2/\d")  # a few steps in
    os.killpg(run.process.pid, signal.SIGTERM)
    assert run.wait() == 143, run.output
    assert run.left_over() == []
    assert "Traceback" not in run.output


@pytest.mark.parametrize(
    ("moment", "signum"),
    [
        ("starting Ray", signal.SIGTERM),  # which Ray would handle itself
        ("starting 1 engine", signal.SIGINT),
        ("trainer-0.log", signal.SIGINT),
    ],
)
def test_an_interruption_while_processes_start_leaves_nothing(
    slime_train: Start, moment: str, signum: signal.Signals
) -> None:
    run = slime_train("--num-rollout", "100000", "--async")
    if moment.endswith(".log"):
        run.wait_until((run.run_dir / "logs" / moment).exists)
    else:
        run.wait_for_output(moment)
    if signum == signal.SIGINT:
        os.killpg(run.process.pid, signum)
    else:
        time.sleep(0.5)  # ray.init has begun
        run.process.send_signal(signum)
    assert run.wait() == (130 if signum == signal.SIGINT else 143), run.output
    assert ("Ctrl-C" in run.output) == (signum == signal.SIGINT), run.output
    assert run.left_over() == []
    assert "Traceback" not in run.output


@pytest.mark.row("T2")
def test_a_killed_engine_ends_the_run_and_is_named(slime_train: Start) -> None:
    run = slime_train("--num-rollout", "100000", "--no-use-fault-tolerance")
    run.wait_for_output(r"\b1/\d")
    engines = [p for p in processes_marked(run.mark) if "slime.engine.launch" in " ".join(command_of(p))]
    assert engines
    min(engines, key=psutil.Process.create_time).kill()
    assert run.wait() == 1, run.output
    assert "engine 0" in run.output
    assert "SIGKILL" in run.output
    assert run.left_over() == []


def test_an_engine_that_dies_at_start_shows_its_last_log_lines(slime_train: Start) -> None:
    # SGLang looks at the weights only when it loads them.
    run = slime_train("--num-rollout", "1", "--sglang-load-format", "gguf")
    assert run.wait() == 1, run.output
    assert "engine-0.log" in run.output
    assert "is not a file" in run.output
    assert run.left_over() == []
