"""TensorBoard events, written with TensorBoard's own writer (no torch)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.observe.metrics import finite_or_none


class TensorBoardWriter:
    """Scalars into an events file in the run folder, found by `tensorboard --logdir outputs/`."""

    def __init__(self, run_dir: Path, *, flush_secs: int = 10) -> None:
        """Open a new events file.  Raises `OSError`.

        The writer's own thread fills the file, at least every `flush_secs` seconds.
        """
        # Imported here: half a second that only a run should pay.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._writer: Any = EventFileWriter(str(run_dir), flush_secs=flush_secs)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add every finite metric as a scalar; TensorBoard draws a gap for the others."""
        summary = self._summary()
        for tag, value in finite_or_none(metrics).items():
            if value is not None:
                summary.value.add(tag=tag, simple_value=value)
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=summary))

    def close(self) -> None:
        """Write what is pending and close the file."""
        self._writer.close()
