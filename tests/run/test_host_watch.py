"""Processes that ended, are stopped or hang are found and named; those that are only slow are not."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from slime.kit.processes import pulse
from slime.kit.processes.pulse import idle_too_long, read_pulse
from slime.observe.log import log_excerpt
from slime.run.supervise.host_watch import HostWatch, Trouble, WatchedProcess

HANG_S = 1.0
PTRACE_ATTACH, PTRACE_DETACH = 16, 17
Start = Callable[[str], WatchedProcess]

PULSE = f"""
import hashlib, itertools, sys, time
from slime.kit.processes.pulse import PULSE
print(PULSE.start({HANG_S}), flush=True)
"""
NAMES = ("engine 1's supervisor", "engine 1's scheduler", "engine 10's supervisor")
KEEPS_THE_INTERPRETER = "print('in it', file=sys.stderr); time.sleep(1); sum(itertools.count())"
#: hashing lets other threads run
COMPUTES = "block = bytes(2**28)\nwhile True: hashlib.sha256(block)"
NEVER_RETURNS = """
def spin():
    while True: pass
with PULSE.inside("estimator p/spinning"): spin()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that beats and then runs some code."""
    children: list[subprocess.Popen[str]] = []

    def start(code: str) -> WatchedProcess:
        log = tmp_path / f"{len(children)}.log"
        with log.open("w") as out:
            argv = [sys.executable, "-c", PULSE + code]
            child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=out, text=True)
        children.append(child)
        assert child.stdout is not None
        page = int(child.stdout.readline())
        return WatchedProcess(f"part {len(children) - 1}", "trainer", child.pid, log, page)

    yield start
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def look_for(watch: HostWatch, seconds: float) -> list[Trouble]:
    """The first troubles that are found, if there are any in this time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if troubles := watch.look():
            return troubles
        time.sleep(0.05)
    return []


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def watching(*parts: WatchedProcess) -> HostWatch:
    watch = HostWatch(HANG_S)
    for part in parts:
        watch.add(part)
    return watch


def test_a_process_that_ended_is_named_with_its_pid_host_and_log(start: Start) -> None:
    well, ended = start("time.sleep(60)"), start("sys.exit('out of luck')")
    [trouble] = look_for(watching(well, ended), 30)
    assert (trouble.part, trouble.kind) == (ended, "ended")
    text = trouble.describe()
    assert text.startswith(f"part 1 (pid {ended.pid} on {os.uname().nodename}) has ended")
    assert str(ended.log) in text and "out of luck" in text


def test_what_is_killed_is_watched_no_longer(start: Start) -> None:
    parts = [replace(start("time.sleep(60)"), name=name, kind="engine") for name in NAMES]
    watch = watching(*parts)
    os.kill(parts[1].pid, signal.SIGSTOP)
    watch.kill("engine 1")
    wait_for(lambda: [psutil.Process(part.pid).status() for part in parts[:2]] == [psutil.STATUS_ZOMBIE] * 2)
    assert watch.look(at_once=True) == []
    os.kill(parts[2].pid, signal.SIGSTOP)
    wait_for(lambda: [trouble.part for trouble in watch.look(at_once=True)] == [parts[2]])


def test_what_a_process_says_is_read_also_after_it_has_said_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT_S", 0.01)
    own = pulse.Pulse()
    page = own.start(60.0)
    for text in ("long" * 5000, "short"):
        own.say(text=text)
        wait_for(lambda text=text: (read_pulse(os.getpid(), page) or {}).get("text") == text)


def test_a_process_that_cannot_say_everything_goes_on_beating(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        attempts.append(1)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(pulse, "BEAT_S", 0.01)
    attempts: list[int] = []
    own = pulse.Pulse()
    own.each_beat(fail)
    page = own.start(60.0)
    first = read_pulse(os.getpid(), page)
    assert first is not None
    wait_for(lambda: len(attempts) > 2 and (read_pulse(os.getpid(), page) or first)["beat"] > first["beat"])
    assert [record.exc_info is not None for record in caplog.records] == [True], "it is logged, and once"


@pytest.mark.nightly
def test_a_stopped_process_is_named_after_a_while_or_at_once_to_explain_an_error(start: Start) -> None:
    part = start("time.sleep(60)")
    watch = watching(part)
    os.kill(part.pid, signal.SIGSTOP)
    while not (at_once := watch.look(at_once=True)):
        time.sleep(0.01)
    assert [trouble.kind for trouble in at_once] == ["stopped"]
    assert watching(part).look() == []
    [trouble] = look_for(watch, 30)
    assert "is stopped (SIGSTOP" in trouble.describe()
    os.kill(part.pid, signal.SIGCONT)
    assert look_for(watch, 2 * HANG_S) == []


@pytest.mark.slow
def test_a_process_that_a_debugger_holds_is_left_alone(start: Start) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    part = start("time.sleep(60)")
    attached: list[int] = []

    def hold() -> None:  # only this thread can let it go
        attached.append(libc.ptrace(PTRACE_ATTACH, part.pid, None, None))
        held.set()
        release.wait(120)
        libc.ptrace(PTRACE_DETACH, part.pid, None, None)

    held, release = threading.Event(), threading.Event()
    debugger = threading.Thread(target=hold)
    debugger.start()
    try:
        assert held.wait(60)
        if attached != [0]:
            pytest.skip("this machine permits no debuggers")
        while Path(f"/proc/{part.pid}/stat").read_text().rpartition(")")[2].split()[0] != "t":
            time.sleep(0.01)
        watch = watching(part)
        assert look_for(watch, 2 * HANG_S) == [] and watch.look(at_once=True) == []
    finally:
        release.set()
        debugger.join()


@pytest.mark.nightly
def test_native_code_that_keeps_the_interpreter_is_a_hang_with_its_stack(start: Start) -> None:
    part = start(KEEPS_THE_INTERPRETER)
    [trouble] = look_for(watching(part), 60)
    assert trouble.kind == "hung"
    text = trouble.describe()
    assert "none of its Python code has run" in text and "--hang-timeout-s" in text
    assert 'File "<string>", line 5 in <module>' in text  # the line of `sum`


@pytest.mark.nightly
def test_native_code_that_lets_other_threads_run_is_no_hang(start: Start) -> None:
    assert look_for(watching(start(COMPUTES)), 3 * HANG_S) == []


@pytest.mark.slow
def test_a_component_that_does_not_return_is_named_with_its_line(start: Start) -> None:
    [trouble] = look_for(watching(start(NEVER_RETURNS)), 60)
    assert trouble.kind == "hung"
    assert "estimator p/spinning has not returned for" in trouble.what
    assert trouble.what.endswith("at <string>:7 in spin")


def test_a_gap_between_looks_is_not_counted_as_silence(start: Start) -> None:
    part = start("time.sleep(60)")
    watch = HostWatch(10.0)
    watch.add(part)
    os.kill(part.pid, signal.SIGSTOP)
    watch.look()
    watch._looked_at -= 3600  # as if this machine had slept
    assert watch.look() == []


@pytest.mark.parametrize(
    ("computed_s", "state", "hangs"),
    [(0.1, "S", True), (6.0, "R", True), (0.1, "R", False), (0.1, "D", False)],
    ids=["sleeps", "computes", "waits for a processor", "waits for a disk"],
)
def test_silence_is_a_hang_only_of_what_sleeps_or_computes(computed_s: float, state: str, hangs: bool) -> None:
    assert idle_too_long(21.0, computed_s, state, 20.0) is hangs
    assert not idle_too_long(19.0, computed_s, state, 20.0)


def test_the_end_of_a_log_is_shown_under_its_name(tmp_path: Path) -> None:
    log = tmp_path / "some.log"
    log.write_text("".join(f"line {number}\n\n" for number in range(100)))
    assert log_excerpt(log).splitlines()[0] == f"Last lines of {log}:"
    assert log_excerpt(log).splitlines()[-1] == "line 99" and "line 50" not in log_excerpt(log)
    assert log_excerpt(None) == ""


# --- engines --------------------------------------------------------------------------------------

SLEEPS = "exec -a sglang::scheduler_TP0 sleep 60"
SPINS = f"exec -a sglang::scheduler_TP0 {sys.executable} -c 'while True: pass'"
COMPILES = f"exec -a sglang::scheduler_TP0 bash -c '{sys.executable} -c \"while True: pass\" & wait'"
FORKS = "exec -a sglang::scheduler_TP0 bash -c '(while [ $SECONDS -lt 2 ]; do sleep 0.1; done) & wait; sleep 60'"


@pytest.fixture
def engine(start: Start) -> Iterator[Callable[[str, str], WatchedProcess]]:
    """Starts a stand-in for an engine, with a scheduler, and a supervisor that says what it knows of it."""
    groups: list[int] = []

    def make(scheduler: str, silent: str) -> WatchedProcess:
        server = subprocess.Popen(["bash", "-c", f"({scheduler}) & exec sleep 60"], start_new_session=True)
        groups.append(server.pid)
        about = {"name": "engine 0", "group": server.pid, "log": "/nowhere"}
        answers = {"server_at", "scheduler_at"} - {silent}
        code = f"PULSE.say(engine={about}, {silent}=0)\nwhile True:\n    time.sleep(0.1)\n"
        return start(code + f"    PULSE.say({', '.join(f'{name}=time.monotonic()' for name in answers)})")

    yield make
    for group in groups:
        os.killpg(group, signal.SIGKILL)
        os.waitpid(group, 0)


Engine = Callable[[str, str], WatchedProcess]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("silent", "part", "question"),
    [("server_at", "HTTP server", "/health"), ("scheduler_at", "scheduler_TP0", "/server_info")],
)
def test_an_idle_process_of_an_engine_that_does_not_answer_hangs(
    silent: str, part: str, question: str, engine: Engine
) -> None:
    [trouble] = look_for(watching(engine(SLEEPS, silent)), 30)
    assert trouble.part.name == f"engine 0's {part}"
    assert trouble.what.startswith(f"hangs: it has not answered {question} for")


@pytest.mark.nightly
def test_a_scheduler_that_computes_or_waits_for_weights_does_not_hang(engine: Engine) -> None:
    assert look_for(watching(engine(SPINS, "scheduler_at")), 3 * HANG_S) == []
    assert look_for(watching(engine(COMPILES, "scheduler_at")), 3 * HANG_S) == []
    waiting, end = watching(engine(SLEEPS, "scheduler_at")), time.monotonic() + 3 * HANG_S
    while time.monotonic() < end:
        assert waiting.look(syncing=True) == []
        time.sleep(0.05)


@pytest.mark.nightly
def test_what_a_scheduler_forks_may_end(engine: Engine) -> None:
    supervisor, watch = engine(FORKS, "server_at"), HostWatch(60.0)
    watch.add(supervisor)
    assert look_for(watch, 4) == []
    names = [record.part.name for record in watch._records.values()]
    assert names.count("engine 0's scheduler_TP0") == 1


@pytest.mark.nightly
def test_a_dead_scheduler_is_named_and_a_dead_server_is_left_to_its_supervisor(engine: Engine) -> None:
    supervisor = engine(SLEEPS, "server_at")
    watch = HostWatch(60.0)
    watch.add(supervisor)
    deadline = time.monotonic() + 30
    while len(watch._records) < 3 and time.monotonic() < deadline:
        watch.look()
        time.sleep(0.05)
    pids = {record.part.name: pid for pid, record in watch._records.items()}
    os.kill(pids["engine 0's scheduler_TP0"], signal.SIGKILL)
    [trouble] = look_for(watch, 30)
    assert (trouble.part.name, trouble.kind) == ("engine 0's scheduler_TP0", "ended")
    os.kill(pids["engine 0's HTTP server"], signal.SIGKILL)
    while watch.look() and time.monotonic() < deadline + 60:
        time.sleep(0.05)
    assert watch.look() == []
