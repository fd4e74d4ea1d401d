"""Runs Python programs that the model writes, in the sandbox."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from slime_sandbox import Isolation, Limits, Outcome, python_argv, run_program

LIMITS = Limits(wall_s=10.0, cpu_s=10.0, memory_mb=512, file_mb=16, processes=16, output_kb=64)
_ENDINGS = {
    "timeout": f"error: the program did not end within {LIMITS.wall_s:g} s",
    "cpu": f"error: the program took more than {LIMITS.cpu_s:g} s of processor time",
    "memory": f"error: the program took more than {LIMITS.memory_mb} MiB of memory",
    "output": f"error: the program wrote more than {LIMITS.output_kb} KiB",
}


def python_tool(require: Isolation) -> Callable[[str], Awaitable[str]]:
    """The tool, which fails on a machine that permits less isolation than `require`."""

    async def python(code: str) -> str:
        """Run a Python program and get what it prints.

        Args:
            code: the whole program; each call starts a new one
        """
        files = {"program.py": code.encode("utf-8", "replace")}
        return _result(await run_program(python_argv("program.py"), files=files, limits=LIMITS, require=require))

    return python


def _result(outcome: Outcome) -> str:
    """The program's output, followed by its error if it has one."""
    printed = outcome.stdout.decode("utf-8", "replace")
    if outcome.kind == "ok":
        return printed or "(the program printed nothing)"
    # The last lines of a traceback name the error.
    trace = "\n".join(outcome.stderr.decode("utf-8", "replace").strip().splitlines()[-6:])
    ending = _ENDINGS.get(outcome.kind) or trace or f"error: the program ended with status {outcome.returncode}"
    return f"{printed.rstrip()}\n{ending}".lstrip()
