"""The classes whose methods are called in other processes: `trainer.begin(TrainerProcess.train, batch)`.

An editor jumps to the method and mypy checks the arguments. The caller loads none of these classes: the trainer's
imports torch and Megatron, and what the trainer itself calls of an engine must not load the engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.run.engines import EngineProcess
    from slime.run.rollout_process import RolloutProcess
    from slime.run.trainer import TrainerProcess
else:

    class _MethodNames:
        """Stands for a class: its attributes are their own names, which is all that a call sends."""

        def __getattr__(self, name: str) -> str:
            if name.startswith("__"):
                raise AttributeError(name)
            return name

    EngineProcess = RolloutProcess = TrainerProcess = _MethodNames()

__all__ = ["EngineProcess", "RolloutProcess", "TrainerProcess"]
