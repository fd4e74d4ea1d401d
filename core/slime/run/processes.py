"""The classes whose methods the driver calls in other processes: `trainer.begin(TrainerProcess.train, batch)`.

An editor jumps to the method and mypy checks the arguments. The driver loads neither class, because the trainer's
imports torch and Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.run.rollout_process import RolloutProcess
    from slime.run.trainer import TrainerProcess
else:

    class _MethodNames:
        """Stands for a class: its attributes are their own names, which is all that a call sends."""

        def __getattr__(self, name: str) -> str:
            if name.startswith("__"):
                raise AttributeError(name)
            return name

    RolloutProcess = TrainerProcess = _MethodNames()

__all__ = ["RolloutProcess", "TrainerProcess"]
