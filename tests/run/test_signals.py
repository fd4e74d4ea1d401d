"""Interruptions of a run."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import pytest

from slime.run.signals import interruptions_kept

#: a signal while a daemon is forked, as Ray forks its own
FORKING = """
import os, signal, subprocess
from contextlib import nullcontext
from slime.run.signals import interruptions_kept

os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with {context}():
        subprocess.Popen(["true"], preexec_fn=lambda: None).wait()
    print("went on")
except KeyboardInterrupt:
    print("ended")
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_that_the_body_drops_or_turns_into_an_error_ends_it(
    signum: signal.Signals, error: type[BaseException]
) -> None:
    before = signal.getsignal(signum)
    with pytest.raises(KeyboardInterrupt), interruptions_kept():
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signum)
        if error is RuntimeError:
            raise error
    assert signal.getsignal(signum) is before


def test_an_error_without_an_interruption_is_raised() -> None:
    with pytest.raises(RuntimeError, match="no disk"), interruptions_kept():
        raise RuntimeError("no disk")


@pytest.mark.parametrize(("context", "printed"), [("nullcontext", "went on"), ("interruptions_kept", "ended")])
def test_an_interruption_while_a_process_is_forked_is_not_lost(context: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING.format(context=context)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == printed, done.stderr
    # If this Python no longer drops it, `interruptions_kept` can go.
    assert ("Exception ignored" in done.stderr) == (context == "nullcontext")
