"""Evaluation alone: a model folder, or the weights of a checkpoint made into one, behind engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from slime.checkpoint.folder import Checkpoint
from slime.cluster.engine_group import EngineGroup
from slime.cluster.placement import place
from slime.cluster.rollout_process import RolloutProcess
from slime.cluster.run import uninterrupted
from slime.cluster.trainer_group import TrainerGroup
from slime.config import RunConfig
from slime.errors import EngineError, SlimeError
from slime.plugins import PluginSet
from slime.rollout.evaluation import EvalReport


def export_checkpoint(
    checkpoint: Checkpoint, config: RunConfig, run_dir: Path, plugins: PluginSet, folder: Path
) -> None:
    """The weights of `checkpoint` as a Hugging Face `folder`, written by training ranks that then end.

    `config`: the model and the parallel layout, and a loss that needs no estimator.  Raises `SlimeError`.
    """
    with ExitStack() as last_to_first:
        placement = place(config, with_engines=False)
        last_to_first.callback(placement.release)
        trainer = TrainerGroup(config, run_dir, plugins.fingerprint(config), placement.trainer)
        last_to_first.callback(trainer.stop, orderly=False)
        trainer.start()
        trainer.wait_ready()
        trainer.load(checkpoint.trainer_part, weights_only=True)
        trainer.export_hf(folder)
        trainer.stop(orderly=True)


class EvaluationRun:
    """Engines, router and rollout process, and nothing that trains.

    Everything is started in `__enter__` and ended in `close`, whatever happened between.  Ray has been started.
    """

    def __init__(self, config: RunConfig, run_dir: Path, plugins: PluginSet) -> None:
        self._config = config
        self._run_dir = run_dir
        self._plugins = plugins
        self._engines: EngineGroup | None = None
        self._rollout: RolloutProcess | None = None
        self._ending = ExitStack()

    def __enter__(self) -> EvaluationRun:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        config = self._config
        provenance = self._plugins.provenance(config)
        (self._run_dir / "plugins.json").write_text(json.dumps(provenance, indent=1), encoding="utf-8")
        placement = place(config, with_engines=True, with_trainer=False)
        self._ending.callback(placement.release)
        self._engines = EngineGroup(config, self._run_dir, placement.engines)
        self._ending.callback(self._engines.stop)
        self._rollout = RolloutProcess(config, self._run_dir, self._plugins.fingerprint(config), evaluates_only=True)
        self._ending.callback(self._rollout.stop)
        self._rollout.start(self._engines.url)
        url = self._engines.wait_ready(self._rollout.check_starting)
        self._rollout.wait_ready(self._engines.check_alive)
        self._rollout.connect(url, self._engines.urls)

    def evaluate(self, number: int, on_progress: Callable[[int, int], None]) -> EvalReport:
        """All sets; `number`: rollouts that the weights were trained on.  Raises `SlimeError`."""
        assert self._rollout is not None and self._engines is not None
        ref = self._rollout.start_evaluation(number)
        try:
            return self._rollout.wait_evaluation(ref, number, self._engines.check_alive, on_progress)
        except SlimeError as error:
            if failures := self._dead_engines():
                raise EngineError("\n".join(failures)) from error
            raise

    def _dead_engines(self) -> list[str]:
        """How engines ended, where some did: what failed elsewhere then failed of that."""
        try:
            return [] if self._engines is None else self._engines.failures()
        except SlimeError:
            return []  # their actors do not answer either: the error at hand says more

    def close(self) -> None:
        """End every process that was started; a second Ctrl-C does not interrupt it."""
        with uninterrupted():
            self._ending.close()
