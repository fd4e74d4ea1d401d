"""TensorBoard events."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

from slime.observe.tensorboard import TensorBoardWriter


def test_tensorboard_reads_back_the_scalars_from_the_folder_above(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    run_dir = tmp_path / "outputs" / "some-run"
    run_dir.mkdir(parents=True)
    writer = TensorBoardWriter(run_dir)
    writer.write(0, {"train/loss": 0.5, "train/kl": math.nan})
    writer.write(1, {"train/loss": 0.25, "train/kl": 0.125})
    writer.close()

    logdir = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "outputs")).Reload()
    assert [(e.step, e.value) for e in logdir.Scalars("some-run", "train/loss")] == [(0, 0.5), (1, 0.25)]
    assert [(e.step, e.value) for e in logdir.Scalars("some-run", "train/kl")] == [(1, 0.125)]


def test_writing_events_imports_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from slime.observe.tensorboard import TensorBoardWriter;"
        f"w = TensorBoardWriter(pathlib.Path({str(tmp_path)!r})); w.write(0, {{'a': 1.0}}); w.close();"
        "sys.exit(bool({'torch', 'tensorflow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
