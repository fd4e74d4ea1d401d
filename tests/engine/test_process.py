"""Supervision, with small Python programs as children."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.support.waiting import wait_until

from slime.engine.process import SupervisedProcess
from slime.errors import DeadlineError, EngineError
from slime.kit.processes import DirectChild, living_members
from slime.observe.log import log_excerpt


class Program(SupervisedProcess):
    """A program that never becomes ready."""

    def __init__(self, argv: Sequence[str], log_path: Path) -> None:
        super().__init__("the child", log_path)
        self._argv = argv

    def launch(self) -> DirectChild:
        return DirectChild(self._argv, env=os.environ, log_path=self.log_path)

    def is_ready(self) -> bool:
        return False


SLEEP = "import time; print('sleeping', flush=True); time.sleep(600)"


@pytest.fixture
def child(tmp_path: Path) -> Callable[[str], SupervisedProcess]:
    def make(program: str) -> SupervisedProcess:
        return Program([sys.executable, "-c", textwrap.dedent(program)], tmp_path / "child.log")

    return make


def test_a_process_that_ends_before_it_is_ready_shows_exit_code_and_last_lines(
    child: Callable[[str], SupervisedProcess],
) -> None:
    process = child("import sys; [print('line', i, flush=True) for i in range(100)]; sys.exit('the disk is on fire')")
    process.start()
    with pytest.raises(EngineError) as caught:
        process.wait_ready(timeout_s=60)
    message = str(caught.value)
    assert re.match(r"the child \(pid \d+\) ended with exit code 1 after", message)
    assert "line 99" in message and "the disk is on fire" in message and "line 50\n" not in message
    process.stop()


def test_a_process_that_is_never_ready_runs_into_the_deadline(child: Callable[[str], SupervisedProcess]) -> None:
    process = child(SLEEP)
    process.start()
    wait_until(lambda: "sleeping" in log_excerpt(process.log_path))
    with pytest.raises(DeadlineError, match=r"the child was not ready after 0 s.*\nsleeping"):
        process.wait_ready(timeout_s=0.2)
    assert process.poll() is None
    process.stop()


def test_a_killed_process_is_noticed_and_reported(child: Callable[[str], SupervisedProcess]) -> None:
    process = child(SLEEP)
    process.start()
    wait_until(lambda: "sleeping" in log_excerpt(process.log_path))
    assert process.failure() is None and process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: process.poll() is not None)
    failure = process.failure()
    assert failure is not None and f"(pid {process.pid}) was killed by SIGKILL" in failure and "sleeping" in failure
    process.stop()


def test_an_engine_that_sglang_ended_is_not_blamed_for_the_process_that_it_lost(
    child: Callable[[str], SupervisedProcess],
) -> None:
    # As SGLang 0.5 logs it. The driver names the lost process itself if it sees its end first.
    process = child("""
        import os, signal
        print('Subprocess scheduler_0 (pid=17300) crashed with exit code -9. Triggering SIGQUIT for cleanup...')
        print('kill_process_tree called', flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    process.start()
    wait_until(lambda: process.poll() is not None)
    failure = process.failure()
    assert failure is not None
    said = "was killed by SIGKILL by SGLang, because its scheduler (pid 17300) was killed by SIGKILL, after "
    assert said in failure and "by a person" not in failure
    process.stop()


def test_stop_ends_grandchildren_too(child: Callable[[str], SupervisedProcess]) -> None:
    process = child(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).wait()")
    process.start()
    group = process.pid
    assert group is not None
    wait_until(lambda: "sleeping" in log_excerpt(process.log_path))
    assert len(living_members(group)) == 2
    process.stop()
    assert living_members(group) == []
    assert process.failure() is None, "a process stopped on purpose has not failed"


def test_leftover_processes_are_killed_when_their_parent_ends(child: Callable[[str], SupervisedProcess]) -> None:
    process = child(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); sys.exit(3)")
    process.start()
    group = process.pid
    assert group is not None
    wait_until(lambda: process.poll() == 3)
    assert living_members(group) == []


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(child: Callable[[str], SupervisedProcess]) -> None:
    process = child(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}")
    process.start()
    wait_until(lambda: "sleeping" in log_excerpt(process.log_path))
    group = process.pid
    assert group is not None
    started = time.monotonic()
    process.stop(grace_s=0.5)
    assert 0.5 <= time.monotonic() - started < 60  # it would sleep for ten minutes
    assert living_members(group) == []


def test_a_process_may_exit_on_sigterm(child: Callable[[str], SupervisedProcess]) -> None:
    process = child(f"""
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))
        {SLEEP}
    """)
    process.start()
    wait_until(lambda: "sleeping" in log_excerpt(process.log_path))
    process.stop(grace_s=20)
    assert log_excerpt(process.log_path).endswith("bye")


def test_a_program_that_does_not_exist_is_an_engine_error(tmp_path: Path) -> None:
    process = Program(["/no/such/program"], tmp_path / "log")
    with pytest.raises(EngineError, match="the child could not be started"):
        process.start()


def test_starting_twice_is_refused(child: Callable[[str], SupervisedProcess]) -> None:
    process = child(SLEEP)
    process.start()
    with pytest.raises(EngineError, match="started twice"):
        process.start()
    process.stop()


def test_a_child_dies_with_its_parent_even_by_sigkill(tmp_path: Path) -> None:
    # The grandchild never lets other Python threads run, like the router.
    busy = "import slime.kit.processes as p; p.end_with_parent(); print('up', flush=True)\nwhile True: pass"
    parent_program = textwrap.dedent(f"""
        import os, sys, time
        from pathlib import Path
        from slime.kit.processes import DirectChild
        child = DirectChild([sys.executable, "-c", {busy!r}], env=os.environ, log_path=Path({str(tmp_path / "log")!r}))
        print(child.pid, flush=True)
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", parent_program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    wait_until(lambda: (tmp_path / "log").exists() and "up" in (tmp_path / "log").read_text())
    assert living_members(group) == [group]
    parent.kill()
    parent.wait()
    wait_until(lambda: living_members(group) == [])


def test_the_first_variable_of_a_child_is_one_that_no_child_sets(tmp_path: Path) -> None:
    """A process that sets its first variable again cannot be named: SGLang's scheduler was not known for one."""
    code = "import os, sys; sys.exit(next(iter(os.environ)) != 'PATH' or os.environ['FIRST'] != '1')"
    env = {"FIRST": "1", **os.environ}
    child = DirectChild([sys.executable, "-c", code], env=env, log_path=tmp_path / "log")
    wait_until(lambda: child.poll() is not None)
    assert child.poll() == 0, (tmp_path / "log").read_text()
