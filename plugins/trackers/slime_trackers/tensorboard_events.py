"""TensorBoard events, written with TensorBoard's own writer (no torch)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from slime.plugin import Context
from slime_trackers.options import TensorBoardOptions


class TensorBoardTracker:
    """Scalars in an events file in the run folder; `tensorboard --logdir outputs/` compares runs."""

    def __init__(self, options: TensorBoardOptions, context: Context) -> None:
        self._writer: Any = EventFileWriter(str(context.run_dir), flush_secs=options.flush_secs)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add every metric as a scalar."""
        summary: Any = Summary()
        for tag, value in metrics.items():
            summary.value.add(tag=tag, simple_value=value)
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=summary))

    def close(self, outcome: str) -> None:  # noqa: ARG002 - TensorBoard cannot store it
        """Write pending events and close the file."""
        self._writer.close()
