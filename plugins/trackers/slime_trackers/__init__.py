"""slime's own trackers, registered like those of any other plugin."""

from __future__ import annotations

from slime.plugin import TrackerSpec, hookimpl
from slime_trackers.options import MLflowOptions, TensorBoardOptions, TrackioOptions, WandbOptions

slime_api = 1

_DOCS = "docs/trackers.md"


@hookimpl
def slime_register_trackers() -> list[TrackerSpec]:
    """The trackers of this package."""
    return [
        TrackerSpec(
            name="tensorboard",
            factory="slime_trackers.tensorboard_events:TensorBoardTracker",
            options=TensorBoardOptions,
            summary="TensorBoard events in the run folder",
            docs=_DOCS,
        ),
        TrackerSpec(
            name="wandb",
            factory="slime_trackers.wandb_run:WandbTracker",
            options=WandbOptions,
            summary="a Weights & Biases run; offline by default, for `wandb sync`",
            requires=("wandb>=0.19",),
            docs=_DOCS,
        ),
        TrackerSpec(
            name="trackio",
            factory="slime_trackers.trackio_run:TrackioTracker",
            options=TrackioOptions,
            summary="a Trackio run in a local database, for `trackio show`",
            requires=("trackio>=0.10",),
            docs=_DOCS,
        ),
        TrackerSpec(
            name="mlflow",
            factory="slime_trackers.mlflow_run:MLflowTracker",
            options=MLflowOptions,
            summary="an MLflow run, in a folder or on a tracking server",
            requires=("mlflow-skinny>=3",),
            docs=_DOCS,
        ),
    ]
