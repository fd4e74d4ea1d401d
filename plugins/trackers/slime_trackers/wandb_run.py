"""A Weights & Biases run."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from slime.plugin import Context
from slime_trackers.options import WandbOptions


class WandbTracker:
    """One W&B run per slime run, with the run's name and configuration; its files are in `RUN_DIR/wandb/`."""

    def __init__(self, options: WandbOptions, context: Context) -> None:
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            name=context.run_dir.name,
            dir=str(context.run_dir),
            config=context.config.model_dump(mode="json"),
            mode=options.mode,
            settings=wandb.Settings(silent=True, console="off"),
        )
        # A separate step metric, because W&B drops rows whose step is lower than the previous one, and an evaluation
        # that ran during training is reported later.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one row."""
        self._run.log({"step": step, **metrics})

    def close(self, outcome: str) -> None:
        """Finish the W&B run: with exit code 0 if the slime run finished, else 1."""
        self._run.finish(exit_code=0 if outcome == "finished" else 1)
