"""slime's trackers: their output is read back with their own tools."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.config import RunConfig
from slime.config.options import RunOptions
from slime.plugin import Context
from slime.testing import make_context
from slime_trackers.options import MLflowOptions, TensorBoardOptions, WandbOptions

#: an evaluation that ran during training is reported late, with a lower step
ROWS = [(0, {"train/loss": 0.5}), (1, {"train/loss": 0.25, "train/kl": 0.125}), (0, {"eval/held_out/pass@4": 0.75})]


@pytest.fixture
def context(tmp_path: Path) -> Context:
    run_dir = tmp_path / "outputs" / "some-run"
    run_dir.mkdir(parents=True)
    config = RunConfig(run=RunOptions(output_dir=str(tmp_path / "outputs"), run_name="some-run", seed=7))
    return make_context(run_dir=run_dir, config=config)


def written(tracker: Any, outcome: str = "finished") -> None:
    for step, metrics in ROWS:
        tracker.log(step, metrics)
    tracker.close(outcome)


@pytest.mark.row("W1")
def test_tensorboard_reads_the_scalars_from_the_folder_above(context: Context) -> None:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    from slime_trackers.tensorboard_events import TensorBoardTracker

    written(TensorBoardTracker(TensorBoardOptions(), context))
    logdir = EventMultiplexer().AddRunsFromDirectory(str(context.run_dir.parent)).Reload()
    assert [(e.step, e.value) for e in logdir.Scalars("some-run", "train/loss")] == [(0, 0.5), (1, 0.25)]
    assert [(e.step, e.value) for e in logdir.Scalars("some-run", "train/kl")] == [(1, 0.125)]


def test_writing_tensorboard_events_imports_neither_torch_nor_tensorflow() -> None:
    code = "import sys, slime_trackers.tensorboard_events; sys.exit(bool({'torch', 'tensorflow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of a W&B file: LevelDB's log format behind a header of seven bytes."""
    position, record = 7, b""
    while position + 7 <= len(content):
        if (rest := -position % 32768) < 7:  # a block's end has no room for another header
            position += rest
        length, kind = struct.unpack("<xxxxHB", content[position : position + 7])
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_keeps_every_row_of_an_offline_run(context: Context) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    from slime_trackers.wandb_run import WandbTracker

    written(WandbTracker(WandbOptions(project="p"), context), "failed")
    wandb.teardown()  # ends its process, which writes behind
    [file] = context.run_dir.glob("wandb/offline-run-*/run-*.wandb")
    rows, config, exit_codes, names = [], {}, [], []
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            rows.append({name: float(value) for name, value in row.items() if not name.startswith("_")})
        elif record.WhichOneof("record_type") == "run":
            names.append((record.run.project, record.run.display_name))
            config |= {item.key: item.value_json for item in record.run.config.update}
        elif record.WhichOneof("record_type") == "exit":
            exit_codes.append(record.exit.exit_code)
    assert rows == [{"step": step, **metrics} for step, metrics in ROWS]
    assert '"seed":7' in config["run"].replace(" ", "")
    assert names[0] == ("p", "some-run") and exit_codes == [1]


@pytest.mark.slow
def test_mlflow_reads_back_history_parameters_and_status(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    from slime_trackers.mlflow_run import MLflowTracker

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    written(MLflowTracker(MLflowOptions(experiment="e"), context), "interrupted")
    client = MlflowClient((context.run_dir.parent / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("e")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("some-run", "KILLED")
    assert run.data.params["run.seed"] == "7"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((m.step, m.value) for m in history) == [(0, 0.5), (1, 0.25)]
    assert run.data.metrics["eval/held_out.pass_at_4"] == 0.75


@pytest.mark.slow
def test_trackio_reads_back_every_row(context: Context) -> None:
    pytest.importorskip("trackio")
    # Trackio reads its folder once per process.
    code = f"""
import sys
from tests.trackers.test_trackers import written
from slime_trackers.options import TrackioOptions
from slime.config import RunConfig
from slime.config.options import RunOptions
from slime.testing import make_context
from pathlib import Path
from slime_trackers.trackio_run import TrackioTracker
config = RunConfig(run=RunOptions(output_dir={str(context.run_dir.parent)!r}, run_name="some-run", seed=7))
context = make_context(run_dir=Path({str(context.run_dir)!r}), config=config)
written(TrackioTracker(TrackioOptions(project="p"), context))
from trackio.sqlite_storage import SQLiteStorage
for row in SQLiteStorage.get_logs("p", "some-run"):
    print({{name: value for name, value in row.items() if name != "timestamp"}})
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRACKIO_DIR"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert [eval(line) for line in ended.stdout.splitlines()] == [{**metrics, "step": step} for step, metrics in ROWS]
    assert (context.run_dir.parent / "trackio" / "p.db").is_file()
