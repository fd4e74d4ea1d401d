"""Options of slime's own trackers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime.plugin import Options


class TensorBoardOptions(Options):
    """Options of `tensorboard`."""

    flush_secs: int = Field(default=10, ge=1, description="maximum seconds until events are written to the file")


class WandbOptions(Options):
    """Options of `wandb`."""

    project: str = Field(default="slime", description="project that the run belongs to")
    entity: str | None = Field(default=None, description="user or team that owns the project; default: yours")
    mode: Literal["offline", "online"] = Field(
        default="offline", description="offline: write to the run folder only; `wandb sync` uploads it later"
    )


class TrackioOptions(Options):
    """Options of `trackio`."""

    project: str = Field(default="slime", description="project that the run belongs to")
    folder: str | None = Field(
        default=None, description="folder of the databases (TRACKIO_DIR); default: trackio/ in --output-dir"
    )


class MLflowOptions(Options):
    """Options of `mlflow`."""

    experiment: str = Field(
        default="slime", description="experiment that the run belongs to; created if it does not exist"
    )
    tracking_uri: str | None = Field(
        default=None, description="tracking server or folder; default: the folder mlruns/ in --output-dir"
    )
