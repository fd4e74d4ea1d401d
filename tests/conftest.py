"""For all tests: one thread a process."""

from __future__ import annotations

import os

# Tests compute with tiny models in several processes at once. Thread pools that wait by spinning take the cores from
# the processes that have work: on two busy cores a training step was ten times slower with two threads than with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
