"""Runs untrusted programs in a locked-down process of their own."""

from slime.kit.sandbox.launcher import python_argv
from slime.kit.sandbox.limits import Isolation, Kind, Limits, Outcome
from slime.kit.sandbox.machine import Machine, machine_isolation, require_isolation
from slime.kit.sandbox.run import run_program, run_program_sync

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
