"""Interruptions of a run."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from slime.errors import TerminatedInterrupt
from slime.kit.processes.child import describe_exit
from slime.run.signals import ending_on_signals, interruptions_deferred

#: a signal while a daemon is forked, as Ray forks its own
FORKING = """
import os, signal, subprocess
from contextlib import nullcontext
from slime.run.signals import interruptions_deferred

os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with {context}():
        subprocess.Popen(["true"], preexec_fn=lambda: None).wait()
    print("went on")
except KeyboardInterrupt:
    print("ended")
"""


#: a run whose main thread is in native code that signals do not interrupt, and then cleans up for a minute
BUSY = """
import hashlib, signal, subprocess, sys, threading, time
from slime.run.signals import ending_on_signals, uninterrupted

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started this in the background
child = subprocess.Popen(["sleep", "600"])
with ending_on_signals():
    try:
        threading.Timer(0.2, print, (child.pid,), dict(flush=True)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", {rounds})
        time.sleep(20)
    except KeyboardInterrupt:
        with uninterrupted():
            print("cleaning up", file=sys.stderr, flush=True)
            time.sleep({cleaning})
child.kill()
"""

#: a process that is forked in the body, without a program of its own, and outlives it
FORKED = """
import os, signal, time
from slime.run.signals import ending_on_signals

with ending_on_signals():
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
os.kill(child, signal.SIGKILL)
print("went on")
"""


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    """As in a new process of a terminal: a shell that starts the tests in the background has SIGINT ignored, and a
    library that an earlier test used in this process may have set a handler of SIGTERM."""
    before = [
        (signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler)),
        (signal.SIGTERM, signal.signal(signal.SIGTERM, signal.SIG_DFL)),
    ]
    yield
    for signum, handler in before:
        signal.signal(signum, handler)


@pytest.mark.slow
def test_the_first_interruption_is_answered_at_once_and_the_third_ends_everything() -> None:
    program = [sys.executable, "-c", BUSY.format(rounds=4_000_000, cleaning=20)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        child = psutil.Process(int(run.stdout.readline()))
        run.send_signal(signal.SIGINT)
        assert run.stderr.readline().startswith("slime: interrupted: ending the run")  # before Python raises
        assert run.stderr.readline() == "cleaning up\n"
        run.send_signal(signal.SIGTERM)
        assert run.stderr.readline().startswith("slime: still ending the run; SIGTERM once more ends it at once")
        run.send_signal(signal.SIGINT)
        assert run.stderr.readline() == "slime: ended at once\n"
        assert run.wait(60) == 130
        child.wait(60)


def test_one_interruption_lets_the_run_clean_up() -> None:
    program = [sys.executable, "-c", BUSY.format(rounds=1, cleaning=0.3)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        run.stdout.readline()
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 0


def test_sigterm_has_its_own_words_and_exit_code() -> None:
    program = [sys.executable, "-c", BUSY.format(rounds=1, cleaning=20)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.readline()
        run.send_signal(signal.SIGTERM)
        answers = run.stderr.readline() + run.stderr.readline()
        assert (
            "slime: SIGTERM: ending the run without saving, which can take a minute; SIGTERM twice more ends it"
            in answers
        )
        run.send_signal(signal.SIGTERM)
        assert run.stderr.readline().startswith("slime: still ending the run; SIGTERM once more ends it at once")
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 143


def test_sigterm_interrupts_as_something_of_its_own() -> None:
    with pytest.raises(TerminatedInterrupt), ending_on_signals():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(5)
    with pytest.raises(TerminatedInterrupt), ending_on_signals(), interruptions_deferred():
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(TerminatedInterrupt), ending_on_signals():
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # as Ray does while it waits
    with pytest.raises(KeyboardInterrupt) as raised, ending_on_signals():
        signal.raise_signal(signal.SIGINT)
        time.sleep(5)
    assert not isinstance(raised.value, TerminatedInterrupt)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("error", [None, RuntimeError("the daemon got the signal too")])
def test_an_interruption_ends_the_body_only_where_it_ends(signum: signal.Signals, error: Exception | None) -> None:
    before, lock = signal.getsignal(signum), threading.Lock()
    with pytest.raises(KeyboardInterrupt), interruptions_deferred():
        lock.acquire()
        signal.raise_signal(signum)  # where an exception would leave the lock taken
        lock.release()
        if error is not None:
            raise error
    assert not lock.locked()
    assert signal.getsignal(signum) is before


def test_a_second_interruption_ends_the_body_at_once() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), interruptions_deferred():
        signal.raise_signal(signal.SIGTERM)
        reached.append("after the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("after the second")
    assert reached == ["after the first"]


#: a body that does not end, as Ray's start when the signal has ended one of its daemons
STUCK = """
import signal, time
from slime.run.signals import interruptions_deferred

signal.signal(signal.SIGINT, signal.default_int_handler)
with interruptions_deferred(limit_s=0.5):
    signal.raise_signal(signal.SIGINT)
    time.sleep(60)
"""


def test_a_body_that_does_not_end_after_an_interruption_is_ended() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=50)
    assert done.returncode == 130
    assert done.stderr == "slime: ended at once: Ray has not started within 0.5 s after the interruption\n"


def test_a_signal_whose_handler_raises_nothing_leaves_the_error_of_the_body() -> None:
    handled: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, _: handled.append(signum))
    try:
        with pytest.raises(RuntimeError, match="no node"), interruptions_deferred():
            signal.raise_signal(signal.SIGTERM)
            assert handled == []
            raise RuntimeError("no node")
        assert handled == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_error_without_an_interruption_is_raised() -> None:
    with pytest.raises(RuntimeError, match="no disk"), interruptions_deferred():
        raise RuntimeError("no disk")


@pytest.mark.parametrize(("context", "printed"), [("nullcontext", "went on"), ("interruptions_deferred", "ended")])
def test_an_interruption_while_a_process_is_forked_is_not_lost(context: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING.format(context=context)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == printed, done.stderr
    assert ("Exception ignored" in done.stderr) == (context == "nullcontext")


def test_a_signal_without_a_name_is_nothing_to_answer() -> None:
    number = signal.SIGRTMIN + 5
    before, arrived = signal.signal(number, lambda *_: None), threading.Event()
    try:
        with pytest.raises(KeyboardInterrupt), ending_on_signals() as interrupted:
            arrived = interrupted
            signal.raise_signal(number)
            assert not interrupted.wait(0.1)
            signal.raise_signal(signal.SIGINT)
            time.sleep(5)
        assert arrived.wait(60), "the thread that answers had ended"
    finally:
        signal.signal(number, before)
    assert describe_exit(-number) == f"was killed by signal {number}"
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV"


def test_a_forked_process_that_stays_does_not_keep_the_run_from_its_end() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=50)
    assert done.stdout == "went on\n", done.stderr
