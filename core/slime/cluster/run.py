"""`Run`: the verbs the loops are written in.

Everything a run starts is started in `Run.start` and ended in `Run.close`, whatever happened between.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from slime.checkpoint.folder import ROLLOUT_PART, TRAINER_PART, CheckpointWriter, read_checkpoint
from slime.cluster.engine_group import EngineGroup
from slime.cluster.placement import Placement, place
from slime.cluster.rollout_process import RolloutProcess, RolloutSummary
from slime.cluster.session import RaySession
from slime.cluster.trainer_group import TrainerGroup
from slime.config import RunConfig
from slime.errors import EngineError, PluginContractError, SlimeError
from slime.observe.observer import RunObserver
from slime.plugins import PluginSet


@dataclass(frozen=True)
class PendingRollout:
    """A rollout that is being generated (or done): where its summary and its batch will be."""

    number: int
    summary: Any
    batch: Any


@dataclass(frozen=True)
class TrainableRollout:
    """A finished rollout: what to show, and a reference to what to train on."""

    summary: RolloutSummary
    batch: Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT and SIGTERM are ignored in the body."""
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class Run:
    """Engines, router, rollout process and trainer ranks of one run."""

    def __init__(self, config: RunConfig, run_dir: Path, plugins: PluginSet, observer: RunObserver) -> None:
        self.config = config
        self.observer = observer
        self.first_rollout = 0
        self._run_dir = run_dir
        self._plugins = plugins
        self._with_engines = plugins.find("generator", config.generator_name).spec.needs_engine
        self._session = RaySession(config)
        self._placement: Placement | None = None
        self._engines: EngineGroup | None = None
        self._trainer: TrainerGroup | None = None
        self._rollout: RolloutProcess | None = None
        self._weight_version = 0
        self._rollouts_trained = 0
        #: weight version -> rollouts that had been trained on when the engines got it
        self._trained_at: dict[int, int] = {}
        self._seconds: dict[str, float] = {}
        self._step_started = time.monotonic()
        self._writer: CheckpointWriter | None = None
        #: rollouts trained on before the evaluation that is going on, and a reference to its report
        self._evaluating: tuple[int, Any] | None = None

    # --- start and end ---------------------------------------------------------------------------

    def __enter__(self) -> Run:
        try:
            self._start()
        except BaseException:
            self.close(orderly=False)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, SlimeError) and not isinstance(error, EngineError):
                self._blame_dead_engine(error)
        finally:
            self.close(orderly=error is None)

    def _start(self) -> None:
        """Start everything side by side; engines and trainer import their libraries at the same time."""
        config, fingerprint = self.config, self._plugins.fingerprint(self.config)
        checkpoint = read_checkpoint(Path(config.checkpoint.load)) if config.checkpoint.load else None
        provenance = self._plugins.provenance(config)
        (self._run_dir / "plugins.json").write_text(json.dumps(provenance, indent=1), encoding="utf-8")
        if config.checkpoint.save is not None:
            self._writer = CheckpointWriter(Path(config.checkpoint.save), config, provenance)

        engines = f"{config.num_engines} engine(s), router, " if self._with_engines else ""
        self.observer.run_starting(f"Ray, {engines}rollout process, {config.world_size} trainer rank(s)")
        self._session.__enter__()
        self._placement = place(config, with_engines=self._with_engines)
        if self._with_engines:
            self._engines = EngineGroup(config, self._run_dir, self._placement.engines)
        self._trainer = TrainerGroup(config, self._run_dir, fingerprint, self._placement.trainer)
        self._trainer.start()
        self._rollout = RolloutProcess(config, self._run_dir, fingerprint)
        self._rollout.start(None if self._engines is None else self._engines.url)
        router_url = self._engines.wait_ready(self._check_starting) if self._engines is not None else None
        self._rollout.wait_ready(self._watch)
        if router_url is not None and self._engines is not None:
            self._rollout.connect(router_url, self._engines.urls)
        self._trainer.wait_ready(self._watch)

        # The initial weights come first also on resume: they are the frozen reference where the checkpoint has none.
        if config.checkpoint.initial_megatron_checkpoint is not None:
            initial = read_checkpoint(Path(config.checkpoint.initial_megatron_checkpoint))
            self._trainer.load(initial.trainer_part, weights_only=True)
        if checkpoint is not None:
            self._trainer.load(checkpoint.trainer_part, weights_only=False)
            self._weight_version = checkpoint.weight_version
            self._trained_at = checkpoint.trained_at
            self.first_rollout = self._rollouts_trained = checkpoint.rollouts_done
            self._rollout.load(checkpoint.rollout_part)
        self.observer.run_started(config, self._run_dir)

    def close(self, *, orderly: bool) -> None:
        """End every process this run started, whatever ending the others raises.  Safe to call twice.

        A second Ctrl-C or SIGTERM does not interrupt it: every wait inside has a deadline.
        """
        with uninterrupted(), ExitStack() as last_to_first:
            last_to_first.callback(self._session.close)
            if self._placement is not None:
                last_to_first.callback(self._placement.release)
            if self._trainer is not None:
                last_to_first.callback(self._trainer.stop, orderly=orderly)
            if self._engines is not None:
                last_to_first.callback(self._engines.stop)
            if self._rollout is not None:
                last_to_first.callback(self._rollout.stop)
            self._placement = self._trainer = self._engines = self._rollout = None

    # --- supervision -----------------------------------------------------------------------------

    def _check_starting(self) -> None:
        """Raise what the trainer or the rollout process failed of while the engines start."""
        assert self._trainer is not None and self._rollout is not None
        self._trainer.check_starting()
        self._rollout.check_starting()

    def _watch(self) -> None:
        if self._engines is not None:
            self._engines.check_alive()

    def _blame_dead_engine(self, error: SlimeError) -> None:
        """What failed elsewhere because an engine died is reported as that engine's death."""
        if self._engines is None:
            return
        try:
            failures = self._engines.failures()
        except SlimeError:
            return  # the engines' actors do not answer either: the error at hand says more
        if failures:
            raise EngineError("\n".join(failures)) from error

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - started

    # --- the verbs -------------------------------------------------------------------------------

    def start_step(self) -> None:
        """What follows, up to `finish_step`, is one step."""
        self._seconds.clear()
        self._step_started = time.monotonic()

    def start_generation(self, number: int) -> PendingRollout:
        """Begin generating rollout `number`; returns at once."""
        assert self._rollout is not None
        summary, batch = self._rollout.start_generation(number, self._rollouts_trained)
        return PendingRollout(number, summary, batch)

    def wait_generation(self, pending: PendingRollout) -> TrainableRollout:
        """Wait until a rollout is finished: rewarded, and exactly one batch."""
        assert self._rollout is not None
        with self._timed("time/wait_rollout"):
            try:
                summary = self._rollout.wait_generation(
                    pending.summary, pending.number, self._watch, self.observer.progress
                )
            except EngineError as error:
                self._blame_dead_engine(error)
                raise
        self.observer.rollout_finished(
            summary.number, summary.metrics, summary.examples, summary.failures, summary.findings
        )
        return TrainableRollout(summary, pending.batch)

    def generate(self, number: int) -> TrainableRollout:
        """Generate rollout `number` and wait for it."""
        return self.wait_generation(self.start_generation(number))

    def train(self, rollout: TrainableRollout) -> dict[str, float]:
        """Log-probs, advantages and the optimizer steps of one rollout, on every rank.

        `staleness_max` among the metrics: rollouts trained on between the oldest weights that produced a token of
        this batch and now.
        """
        assert self._trainer is not None
        with self._timed("time/train"):
            metrics = self._trainer.train(rollout.batch, self._watch)
        if (oldest := rollout.summary.metrics.get("rollout/weight_version_min")) is not None:
            metrics["staleness_max"] = float(
                self._rollouts_trained - trained_with(int(oldest), self._trained_at, self.config.generator_name)
            )
        self._rollouts_trained += 1
        return metrics

    def sync_weights(self) -> None:
        """Bring every engine to the trainer's weights, one version up.

        An evaluation that is going on is waited for first, so that its results are of one version.
        """
        if self._engines is None:
            return
        self.finish_evaluation()
        assert self._trainer is not None
        self._weight_version += 1
        self._trained_at[self._weight_version] = self._rollouts_trained
        with self._timed("time/sync_weights"):
            self._trainer.sync_weights(
                self._engines.urls, self._engines.tp_size, str(self._weight_version), self._watch
            )

    def start_evaluation(self, number: int) -> None:
        """Begin scoring the held-out sets under the engines' current weights; one evaluation at a time."""
        assert self._rollout is not None
        self.finish_evaluation()
        self._evaluating = (number, self._rollout.start_evaluation(number))

    def finish_evaluation(self, *, wait: bool = True) -> None:
        """Report the evaluation that is going on, if there is one; without `wait` only where it is over."""
        assert self._rollout is not None
        if self._evaluating is None or not (wait or self._rollout.evaluated(self._evaluating[1])):
            return
        number, ref = self._evaluating
        self._evaluating = None
        with self._timed("time/wait_evaluation"):
            try:
                report = self._rollout.wait_evaluation(ref, number, self._watch, self.observer.progress)
            except EngineError as error:
                self._blame_dead_engine(error)
                raise
        self.observer.eval_finished(number, report)

    def evaluate(self, number: int) -> None:
        """Score the held-out sets under the engines' current weights."""
        self.start_evaluation(number)
        self.finish_evaluation()

    def save(self, rollouts_done: int) -> None:
        """Write a checkpoint that continues after `rollouts_done` rollouts."""
        assert self._trainer is not None and self._rollout is not None
        if self._writer is None:
            return
        temporary = self._writer.begin(rollouts_done)
        self._trainer.save(temporary / TRAINER_PART)
        self._rollout.save(temporary / ROLLOUT_PART, rollouts_done, self._watch)
        path = self._writer.commit(
            temporary, rollouts_done=rollouts_done, weight_version=self._weight_version, trained_at=self._trained_at
        )
        self.observer.checkpoint_saved(rollouts_done, path)

    def export_hf(self, rollouts_done: int) -> None:
        """Write the current weights as a Hugging Face folder, where `--save-hf` asks for it."""
        assert self._trainer is not None
        if self.config.checkpoint.save_hf is None:
            return
        folder = Path(self.config.checkpoint.save_hf.format(rollout=rollouts_done))
        self._trainer.export_hf(folder)
        self.observer.model_exported(folder)

    def finish_step(self, rollout: TrainableRollout, train_metrics: dict[str, float]) -> None:
        """Report one step: the rollout's metrics, the trainer's, and where the seconds went."""
        metrics = {**rollout.summary.metrics, **train_metrics, **self._seconds}
        metrics["time/step"] = time.monotonic() - self._step_started
        metrics["weight_version"] = float(self._weight_version)
        self.observer.step_finished(rollout.summary.number, metrics)


def trained_with(version: int, trained_at: Mapping[int, int], generator: str) -> int:
    """How many rollouts the weights of `version` had been trained on.  `trained_at`: that of every version there was.

    Raises `PluginContractError` for a version that no engine ever had.
    """
    if version not in trained_at:
        known = f"{min(trained_at)} to {max(trained_at)}" if trained_at else "none"
        raise PluginContractError(
            f"generator {generator} returned a sample with weight version {version}, and the engines had versions"
            f" {known}; expected Sample.weight_versions to be those of its Generations"
        )
    return trained_at[version]
