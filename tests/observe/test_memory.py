"""Peak memory of a tree of processes."""

from __future__ import annotations

import subprocess
import sys

from slime.observe.memory import process_tree_bytes
from slime.observe.sizes import gibibytes

HOLD_64_MIB = "import sys; block = bytearray(b'x' * 64 * 2**20); print('held', flush=True); sys.stdin.readline()"


#: measured in a separate process, because the test runner's memory changes
MEASURE = f"""
import os, subprocess, sys, time
from slime.observe.memory import PeakMemory, process_tree_bytes

watched = PeakMemory(interval_s=0.05).start()
before = process_tree_bytes(os.getpid())
pipe = subprocess.PIPE
child = subprocess.Popen([sys.executable, "-c", {HOLD_64_MIB!r}], stdin=pipe, stdout=pipe, text=True)
assert child.stdout.readline() == "held\\n"
deadline = time.monotonic() + 60
while watched.peak_bytes < before + 64 * 2**20 and time.monotonic() < deadline:
    time.sleep(0.05)
child.communicate("done\\n", timeout=60)
peak = watched.stop()
assert peak >= before + 64 * 2**20, (peak, before)
assert process_tree_bytes(os.getpid()) < peak - 32 * 2**20
"""


def test_the_peak_includes_child_processes_that_have_ended() -> None:
    subprocess.run([sys.executable, "-c", MEASURE], check=True, timeout=120)


def test_a_process_that_has_ended_counts_as_zero() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=60)
    assert process_tree_bytes(child.pid) == 0


def test_sizes_are_shown_in_gibibytes() -> None:
    assert gibibytes(3.14 * 2**30) == "3.1 GiB"
