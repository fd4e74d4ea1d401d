"""Long help texts in a terminal go through the user's pager."""

from __future__ import annotations

import os
import pty
import shlex
import sys
from contextlib import suppress

import pytest

#: a pager that a person interrupts, which ends a search in less
INTERRUPTED = "import os, signal, sys; sys.stdin.read(); os.killpg(0, signal.SIGINT)"
PAGER = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {INTERRUPTED}; print('paged')"
PROGRAM = "import sys; from slime.cli.output import page; page('line\\n' * 500); print('went on')"


def in_a_terminal(pager: str) -> tuple[int, str]:
    """The exit code and the output of a program that pages a text, in a terminal of its own."""
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, [sys.executable, "-c", PROGRAM], {**os.environ, "PAGER": pager})
    shown = b""
    with suppress(OSError), os.fdopen(terminal, "rb", buffering=0) as output:
        while part := output.read(65536):
            shown += part
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown.decode()


def test_an_interruption_is_the_pagers() -> None:
    code, shown = in_a_terminal(shlex.join([sys.executable, "-c", PAGER]))
    assert (code, shown.split("\r\n")) == (0, ["paged", "went on", ""])


@pytest.mark.parametrize("pager", ["less '", "", "no-such-pager"])
def test_without_a_pager_the_text_is_printed(pager: str) -> None:
    code, shown = in_a_terminal(pager)
    assert code == 0 and shown.count("line\r\n") == 500 and shown.endswith("went on\r\n")
