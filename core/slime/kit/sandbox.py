"""Runs untrusted programs in a locked-down process of their own: the package `slime_sandbox`, imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_sandbox import (
        Isolation,
        Kind,
        Limits,
        Machine,
        Outcome,
        machine_isolation,
        python_argv,
        require_isolation,
        run_program,
        run_program_sync,
    )
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from slime.shops import import_shop

        return getattr(import_shop("slime_sandbox", f"{__name__}.{name}"), name)


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
