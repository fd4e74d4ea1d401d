"""A Trackio run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from slime.plugin import Context
from slime_trackers.options import TrackioOptions


class TrackioTracker:
    """One Trackio run per slime run, in a database on this machine; a resumed run is continued."""

    def __init__(self, options: TrackioOptions, context: Context) -> None:
        folder = context.run_dir.parent / "trackio" if options.folder is None else Path(options.folder)
        # Trackio reads the variable only when it is imported.
        os.environ.setdefault("TRACKIO_DIR", str(folder.resolve()))
        import trackio

        with redirect_stdout(StringIO()):  # its output would mix with the run's
            self._finish = trackio.finish
            self._run = trackio.init(
                project=options.project,
                name=context.run_dir.name,
                config=context.config.model_dump(mode="json"),
                resume="allow",
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one row."""
        self._run.log(dict(metrics), step=step)

    def close(self, outcome: str) -> None:  # noqa: ARG002 - Trackio cannot store it
        """Write pending rows."""
        with redirect_stdout(StringIO()):
            self._finish()
