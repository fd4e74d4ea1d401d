"""The runs of a folder, such as `outputs/`: one line for each, found anew whenever it is looked at."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.errors import DataError
from slime.observe.metrics import eval_set_names
from slime_viewer.progress import progress
from slime_viewer.run_files import CONFIG, METRICS, SAMPLES, RunFolder

#: runs of a folder that are listed, the newest first
_MOST = 500


def is_folder_of_runs(path: Path) -> bool:
    """Whether a folder is no run, and holds some or may get some."""
    return path.is_dir() and not any((path / name).exists() for name in (CONFIG, METRICS, SAMPLES))


@dataclass
class RunList:
    """The runs in some folders. Metrics that have not changed are not read again."""

    roots: Sequence[Path]
    _known: dict[Path, RunFolder] = field(default_factory=dict)
    #: held by whoever reads: several pages may ask at once
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each run, the newest first."""
        found = sorted(((_changed(path), path) for path in self.paths()), reverse=True)[:_MOST]
        with self._reading:
            return [row for changed, path in found if (row := self._row(path, changed)) is not None]

    def paths(self) -> list[Path]:
        """The run folders."""
        found = []
        for root in self.roots:
            try:
                names = sorted(os.listdir(root))
            except OSError:
                continue
            found += [root / name for name in names if (root / name / CONFIG).is_file()]
        return found

    def path_of(self, name: str) -> Path:
        """The folder of a run by its name in `rows`. Raises `DataError`."""
        for path in self.paths():
            if str(path) == name:
                return path
        raise DataError(f"there is no run {name} in {', '.join(map(str, self.roots))}")

    def _row(self, path: Path, changed: float) -> dict[str, Any] | None:
        if path not in self._known:
            try:
                self._known[path] = RunFolder(path)
            except DataError:
                return None
        folder = self._known[path]
        folder.metrics.refresh()
        gone = progress(folder)
        sets = eval_set_names(folder.metrics.names)
        held = folder.metrics.series(f"eval/{sets[0]}")[1] if sets else []
        rewards = folder.metrics.series("rollout/reward_mean")[1]
        return {
            "path": str(path),
            "name": folder.name,
            "state": gone.state,
            "done": gone.done,
            "total": gone.total,
            "held": held[-1] if held else None,
            "reward": rewards[-1] if rewards else None,
            "when": changed,
            "ago_s": max(0.0, time.time() - changed) if changed else None,
        }


def _changed(path: Path) -> float:
    for name in (METRICS, CONFIG):
        try:
            return (path / name).stat().st_mtime
        except OSError:
            continue
    return 0.0
