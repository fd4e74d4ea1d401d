"""`TrainerProcess` for processes that must not load it, since it imports torch and Megatron.

An editor jumps to the class and its methods, and mypy checks the arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.run.trainer import TrainerProcess
else:

    class _TrainerProcess:
        """Stands for the class: calling it builds one, in a process of its own, and its attributes are the names of
        methods, which is all that a call sends."""

        def __call__(self, *args):
            from slime.run.trainer import TrainerProcess

            return TrainerProcess(*args)

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return name

    TrainerProcess = _TrainerProcess()

__all__ = ["TrainerProcess"]
