"""Runs untrusted programs in a locked-down process of their own."""

from slime_sandbox.launcher import python_argv
from slime_sandbox.limits import Isolation, Kind, Limits, Outcome
from slime_sandbox.machine import Machine, machine_isolation, require_isolation
from slime_sandbox.run import run_program, run_program_sync

__all__ = [
    "Isolation",
    "Kind",
    "Limits",
    "Machine",
    "Outcome",
    "machine_isolation",
    "python_argv",
    "require_isolation",
    "run_program",
    "run_program_sync",
]
