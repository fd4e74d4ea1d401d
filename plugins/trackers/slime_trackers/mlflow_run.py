"""An MLflow run."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from slime.plugin import Context
from slime_trackers.options import MLflowOptions

_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
#: MLflow's limits for one request
_METRICS_AT_ONCE, _PARAMS_AT_ONCE = 1000, 100
_LONGEST_VALUE = 500


class MLflowTracker:
    """One MLflow run per slime run; the configuration's fields are its parameters."""

    def __init__(self, options: MLflowOptions, context: Context) -> None:
        uri = options.tracking_uri
        if uri is None:
            # Without a server, MLflow writes to a database, which needs SQLAlchemy, or, if enabled, to a folder.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (context.run_dir.parent / "mlruns").resolve().as_uri()
        self._client = MlflowClient(uri)
        found = self._client.get_experiment_by_name(options.experiment)
        experiment = self._client.create_experiment(options.experiment) if found is None else found.experiment_id
        self._run_id = self._client.create_run(experiment, run_name=context.run_dir.name).info.run_id
        params = [Param(name, value) for name, value in flat(context.config.model_dump(mode="json"))]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS_AT_ONCE])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one value of each metric."""
        now = int(time.time() * 1000)
        rows = [Metric(metric_name(name), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(rows), _METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=rows[start : start + _METRICS_AT_ONCE])

    def close(self, outcome: str) -> None:
        """End the MLflow run with the status that the slime run ended with."""
        self._client.set_terminated(self._run_id, _STATUS.get(outcome, "FAILED"))


def metric_name(name: str) -> str:
    """`name` in a form that MLflow accepts: `eval/SET/pass@4` becomes `eval/SET.pass_at_4`.

    MLflow does not allow "@". If it writes to a folder, `eval/SET` is a file there and cannot also be a folder.
    """
    group, slash, rest = name.partition("/")
    return re.sub(r"[^\w.\- :/]", "_", group + slash + rest.replace("/", ".").replace("@", "_at_"))


def flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, value as text) of every value in nested mappings that is set."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        elif value is not None:
            yield f"{before}{name}", str(value)[:_LONGEST_VALUE]
