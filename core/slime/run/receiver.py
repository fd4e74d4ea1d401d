"""How the trainer reaches the processes beside the engines, each of which has a copy of the weights on its node.

A file of its own because it is unpickled in the trainer, which imports nothing of engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.run.processes import EngineProcess
from slime.run.workers import PendingCall


@dataclass(frozen=True)
class Receiver:
    """Brings the copy of an engine to a version: see `slime.weights.transports.delta.Receive`.

    Made by the driver for the trainer's first rank, anew for each sync, since an engine that was started again has
    another process beside it.

    Attributes:
        beside: URL of an engine -> Ray's handles of the processes beside its servers, and their names and log files.
    """

    beside: dict[str, tuple[list[Any], list[tuple[str, Path]]]]

    def __call__(self, url: str, versions: Path, version: str, timeout_s: float) -> Path:
        """Bring all parts of the engine at `url` to a version of the folder `versions`; the path of each part's copy.

        Raises:
            CheckpointError: The version is gone or damaged, or a copy cannot be written.
            DeadlineError: It took longer than `timeout_s`.
            SlimeError: A process has ended.
        """
        actors, parts = self.beside[url]
        asked = [actor.call.remote(EngineProcess.receive_weights, versions, version) for actor in actors]
        paths: list[Path] = PendingCall(asked, f"applying {version}", timeout_s, parts=parts).wait()
        return paths[0]
