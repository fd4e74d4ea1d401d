"""No child outlives its parent, however the parent dies.

The parent holds the writing end of a pipe that is the child's standard input.  When the parent ends,
even by SIGKILL, the kernel closes that end; the child has asked the kernel to answer that with SIGKILL
to its whole process group.  No thread is needed, so this also works in the router, whose native code
never lets another Python thread run.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat


def end_with_parent() -> None:
    """SIGKILL this process's group as soon as the other end of standard input is closed.

    The process must lead its group.  Does nothing when standard input is no pipe, which is how a person
    starts the program from a terminal.  Linux only (`F_SETSIG`, fcntl(2)).
    """
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return
    fcntl.fcntl(0, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    hung_up = select.poll()
    hung_up.register(0, 0)
    if hung_up.poll(0):  # the parent ended before the kernel was asked
        os.killpg(0, signal.SIGKILL)
