"""Runs untrusted programs in a locked-down process of their own."""

from slime.sandbox.limits import Isolation, Limits
from slime.sandbox.machine import Machine, machine_isolation
from slime.sandbox.outcome import Kind, Outcome
from slime.sandbox.run import python_argv, run_program, run_program_sync

__all__ = [
    "Isolation",
    "Kind",
    "Limits",
    "Machine",
    "Outcome",
    "machine_isolation",
    "python_argv",
    "run_program",
    "run_program_sync",
]
