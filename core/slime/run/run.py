"""`Run`: the methods that the loops call."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

from slime.config import RunConfig
from slime.config.weight_options import SYNC_ANSWER_S
from slime.errors import CheckpointError, CheckpointWriteError, EngineError, PreemptedError, SlimeError, writing
from slime.kit.processes import keep_out_of_collections
from slime.observe.observer import RunObserver, with_prefix
from slime.observe.timing import timed
from slime.registry.plugin_set import Fingerprint, PluginSet
from slime.rollout.evaluation import EvalReport
from slime.rollout.record import Rollout
from slime.run.checkpoint.read import Checkpoint, initial_part, read_checkpoint
from slime.run.checkpoint.retention import Retention
from slime.run.checkpoint.save import Saver, save_model, writer_for
from slime.run.engine_profiles import EngineProfiles
from slime.run.engines import Engines
from slime.run.placement import Placement, place
from slime.run.preemption import Preemption
from slime.run.ray_session import new_meeting_file
from slime.run.remote_trainer import TrainerProcess
from slime.run.rollout_process import RolloutProcess, build_rollout_process
from slime.run.signals import uninterrupted
from slime.run.supervise.recovery import Recovery
from slime.run.supervise.watch import RunWatch
from slime.run.token_log import TokenLog
from slime.run.workers import PendingCall, Watch, Workers
from slime.weights.models import Models

T = TypeVar("T")

Role = Literal["trainer", "engines", "rollout"]
ROLES: frozenset[Role] = frozenset(("trainer", "engines", "rollout"))


class Run:
    """The processes of one run: trainer ranks, engines with their router, and the rollout process.

    A context manager: entering starts all processes, leaving ends them, also after an error. Ray must be running.
    `slime eval` is a run without a trainer, merging adapters a run with only a trainer.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        plugins: PluginSet,
        observer: RunObserver,
        preemption: Preemption | None = None,
        *,
        roles: Collection[Role] = ROLES,
    ) -> None:
        """Describe the run; entering it starts its processes.

        Args:
            config: The run's configuration.
            run_dir: The run folder.
            plugins: The driver's plugins; every process must have the same.
            observer: Receives the events of the run.
            preemption: Whether SIGTERM has asked a training run to end.
            roles: The processes to start; engines only if the run's generator needs them.
        """
        self.config = config
        self.observer = observer
        self.first_rollout = 0
        self._run_dir = run_dir
        self._plugins = plugins
        self._roles = set(roles)
        if not plugins.find("generator", config.generator_name).spec.needs_engine:
            self._roles.discard("engines")
        self._placement: Placement | None = None
        #: `_beside[engine][its rank]`: the trainer's rank on the same device, if they share memory of several nodes
        self._beside: Sequence[Sequence[int]] = ()
        self._watch = watch = RunWatch(config.cluster.hang_timeout_s)
        self._engines = Engines(config, run_dir, watch, Models(plugins, config, run_dir))
        self._profiles = EngineProfiles(config, run_dir, self._engines.keys) if config.run.profiled_steps else None
        self._preemption = preemption
        if preemption is not None:
            watch.supervise(preemption.check)
        logs = run_dir / "logs"
        self._trainer = Workers(
            config, "trainer", logs / "trainer-{index}.log", watch=watch, enlist=watch.enlist("trainer")
        )
        self._rollout = Workers(
            config,
            "rollout process",
            logs / "rollout.log",
            watch=watch,
            enlist=watch.enlist("rollout"),
            asynchronous=True,
        )
        self._recovery = Recovery(
            config, self._engines, watch, self._rollout, observer, trains="trainer" in self._roles
        )
        logs_tokens = config.run.log_token_columns != "none"
        self._token_log = TokenLog(self._trainer, self._rollout, observer, on=logs_tokens)
        self._saver: Saver | None = None
        self._retention = Retention(config.checkpoint, config.evaluation.eval_interval, config.rollout.num_rollout)
        self._weight_version = 0
        self._rollouts_trained = 0
        #: weight version -> rollouts that had been trained on when the engines got it
        self._trained_at: dict[int, int] = {}
        #: rollouts begun and not waited for yet, by number
        self._generating: dict[int, PendingCall[Rollout]] = {}
        #: the evaluation under way, and how many rollouts had been trained on
        self._evaluating: tuple[int, PendingCall[EvalReport]] | None = None
        self._asked_progress: PendingCall[tuple[int, int]] | None = None
        #: metrics of this step's sync, if there was one: bytes of weights that each engine got, and of each sender
        self._synced: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._step_started = time.monotonic()

    # --- start and end ---------------------------------------------------------------------------

    def __enter__(self) -> Run:
        try:
            self._start()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, SlimeError) and not isinstance(error, PreemptedError):
                self._recovery.blame_first_cause(error)
        finally:
            self.close(orderly=error is None)

    def _start(self) -> None:
        """Start all processes side by side, so that their libraries are imported at the same time."""
        config, fingerprint = self.config, self._plugins.fingerprint()
        checkpoint = read_checkpoint(Path(config.checkpoint.load)) if config.checkpoint.load else None
        provenance = self._plugins.provenance(config)
        if config.checkpoint.save is not None:
            writer = writer_for(Path(config.checkpoint.save), config, self._plugins, self._run_dir)
            self._saver = Saver(writer, self._trainer, self._rollout, self.observer, self._retention)

        ranks = config.world_size if "trainer" in self._roles else 0
        num_engines = config.num_engines if "engines" in self._roles else 0
        parts = {
            f"{num_engines} engine(s), router": num_engines > 0,
            "rollout process": "rollout" in self._roles,
            f"{ranks} trainer rank(s)": ranks > 0,
        }
        self.observer.starting(", ".join(part for part, present in parts.items() if present))
        self._watch.add_ray()
        self._plugins.manager.hook.slime_ray_joined(config=config, run_dir=self._run_dir)
        self._placement = place(config, ranks=ranks, num_engines=num_engines, again=self.observer.restarts["run"] > 0)
        self._trainer.start(self._placement.trainer)
        if num_engines:
            self._start_engines(self._placement)
        if "rollout" in self._roles:
            self._rollout.start([{"num_cpus": 0}])
            engines, evaluates_only = (self._engines.url, self._engines.keys), "trainer" not in self._roles
            arguments = (config, self._run_dir, fingerprint, *engines, evaluates_only)
            self._rollout.build(build_rollout_process, [arguments])
        if ranks:
            self._build_trainer(fingerprint)
        self._wait_started()
        self._load(checkpoint)
        path = self._run_dir / "plugins.json"
        with writing(path):
            path.write_text(json.dumps(provenance, indent=1), encoding="utf-8")
        self.observer.run_started(config, self._run_dir)

    def _start_engines(self, placement: Placement) -> None:
        self._engines.start(placement.engines, nodes=placement.nodes_per_engine)

    def _build_trainer(self, fingerprint: Fingerprint) -> None:
        config = self.config
        meeting = new_meeting_file() if config.cluster.ray_address is None else self._trainer.free_addresses()[0]
        ranks = [(config, self._run_dir, fingerprint, rank, meeting) for rank in range(config.world_size)]
        self._trainer.build(TrainerProcess, ranks)

    def _wait_started(self) -> None:
        if self._engines.url is not None:
            self._engines.wait_ready(self._starting("engines"))
        self._rollout.wait_built(self._starting("rollout process"))
        if self._engines.url is not None:
            limit_s, doing = self.config.cluster.startup_timeout_s, "connecting the rollout process to the engines"
            connect, urls = RolloutProcess.connect, self._engines.urls
            self._rollout.begin(connect, self._engines.url, urls, doing=doing, timeout_s=limit_s).wait()
        self._trainer.wait_built(self._starting("trainer"))
        if self.config.rollout.use_rollout_routing_replay:
            layers = self._trainer.begin(TrainerProcess.routed_layers, doing="asking for the ranks' layers").wait()
            self._rollout.begin(RolloutProcess.divide_routes, layers, doing="dividing routed experts").wait()
        self._recovery.begin()
        keep_out_of_collections()

    def _starting(self, part: str) -> Watch:
        """What is checked and shown while the run waits for `part`: the others may fail or hang meanwhile."""

        def watch() -> None:
            self._watch()
            self._trainer.check_building()
            self._rollout.check_building()
            self.observer.still_starting(part)

        return watch

    def _load(self, checkpoint: Checkpoint | None) -> None:
        # Loaded on resume as well: they are the frozen reference if the checkpoint has none.
        if (folder := self.config.checkpoint.initial_megatron_checkpoint) is not None:
            initial = initial_part(Path(folder))
            self._trainer.begin(TrainerProcess.load, initial, True, doing=f"loading {initial}").wait()
        if checkpoint is None:
            return
        self._trainer.begin(
            TrainerProcess.load, checkpoint.trainer_part, doing=f"loading {checkpoint.trainer_part}"
        ).wait()
        self._rollout.begin(RolloutProcess.load, checkpoint.rollout_part, doing="restoring the rollout state").wait()
        # The engines had the checkpoint's weights already, unless they get them every few rollouts only. The first sync
        # sends these weights again, as the same version.
        synced = checkpoint.trained_at.get(checkpoint.weight_version) == checkpoint.rollouts_done
        self._weight_version = checkpoint.weight_version - synced
        self._announce(checkpoint.trained_at).wait()
        self.first_rollout = self._rollouts_trained = checkpoint.rollouts_done
        self.observer.resumed(checkpoint.path, checkpoint.rollouts_done)
        self._retention.resumed(checkpoint.rollouts_done, self._run_dir)

    def close(self, *, orderly: bool) -> None:
        """End every process of this run, even if ending one of them fails. Safe to call twice.

        A second Ctrl-C or SIGTERM does not interrupt it; every wait in it has a deadline.

        Args:
            orderly: Whether the trainer's ranks may leave their process groups together; not after an error.
        """
        with uninterrupted(), ExitStack() as last_to_first:
            self._watch.close()
            if self._placement is not None:
                last_to_first.callback(self._placement.release)
                self._placement = None
            if self._saver is not None:
                last_to_first.callback(self._saver.close)  # when no rank is left that writes to it
            last_to_first.callback(self._trainer.stop, orderly=orderly, grace_s=15.0)
            last_to_first.callback(self._engines.stop)
            last_to_first.callback(self._rollout.stop, grace_s=5.0)

    # --- supervision -----------------------------------------------------------------------------

    def _wait_rollout(self, pending: PendingCall[T], activity: str) -> T:
        """Wait for the rollout process, showing its progress."""

        def watch() -> None:
            self._watch()
            if self._asked_progress is not None and self._asked_progress.finished:
                [(done, total)] = self._asked_progress.wait()
                self._asked_progress = None
                self.observer.progress(activity, done, total)
            if self._asked_progress is None:
                self._asked_progress = self._rollout.begin(RolloutProcess.progress, doing=pending.doing)
            if self._saver is not None:
                self._saver.finish(wait=False)  # the ranks have nothing else to do now
            if self._recovery.waiting:
                self._catch_up(evaluating=activity == "evaluating" or self._evaluating is not None)

        [result] = replace(pending, watch=watch).wait()
        return result

    # --- steps of a loop --------------------------------------------------------------------------

    def start_step(self, number: int) -> None:
        """Start clock and profiles of one rollout, with all its optimizer steps; look at the run's processes."""
        self._watch()  # in a short step every wait may end before it looks
        if self._profiles is not None:
            self._profiles.start(number, self._engines.urls)
        self._seconds.clear()
        self._synced.clear()
        self._step_started = time.monotonic()

    def fresh_enough(self, number: int) -> bool:
        """Whether samples generated from now on for rollout `number` would be within `--max-staleness`."""
        bound = self.config.rollout.max_staleness
        if bound is None or not self._trained_at:
            return True
        return number - self._trained_at[self._weight_version] <= bound

    def start_generation(self, number: int) -> None:
        """Begin generating rollout `number`; returns at once."""
        after = number - 1 if number > self.first_rollout else None
        self._generating[number] = self._rollout.begin(
            RolloutProcess.generate, number, after, self._rollouts_trained, doing=f"generating rollout {number}"
        )

    def wait_generation(self, number: int) -> Rollout:
        """Wait for rollout `number`: one complete batch with rewards."""
        ready = sum(pending.finished for pending in self._generating.values())
        with timed(self._seconds, "time/wait_rollout"):
            rollout = self._wait_rollout(self._generating.pop(number), "generating")
        if self.config.rollout.async_mode:
            rollout.metrics["rollout/ready"] = float(ready)
        self.observer.rollout_finished(rollout)
        return rollout

    def generate(self, number: int) -> Rollout:
        """Generate rollout `number` and wait for it."""
        self.start_generation(number)
        return self.wait_generation(number)

    def train(self, rollout: Rollout) -> dict[str, float]:
        """Log-probs, advantages and the optimizer steps of one rollout, on every rank; the metrics."""
        with timed(self._seconds, "time/train"):
            metrics = self._trainer.begin(TrainerProcess.train, rollout.batch, doing="training").wait()[0]
            self._token_log.begin(rollout.number)
        self._rollouts_trained += 1
        return metrics

    def sync_weights(self) -> None:
        """Send the trainer's weights to every engine, as the next version.

        Waits for a running evaluation first, so that its results are of one version; with `--deterministic` also for
        the rollouts that are being generated: where in an answer new weights come would depend on the time.
        """
        if "engines" not in self._roles:
            return
        self.finish_evaluation()
        if self.config.run.deterministic:
            with timed(self._seconds, "time/wait_rollout"):
                for pending in self._generating.values():
                    self._wait_rollout(pending, "generating")
        with timed(self._seconds, "time/sync_weights"):
            announcement = self._name_weights()
            if self._generating:  # the engines may finish some samples with the new weights at once
                announcement.wait()
            self._send_weights()
            announcement.wait()

    def _name_weights(self) -> PendingCall[None]:
        self._weight_version += 1
        return self._announce({self._weight_version: self._rollouts_trained})

    def _send_weights(self) -> None:
        def send(urls: list[str], restarts: int) -> list[dict[str, float]]:
            with self._watch.during_sync():
                return self._trainer.begin(
                    TrainerProcess.sync_weights,
                    urls,
                    self._engines.keys,
                    self._engines.tp_size,
                    str(self._weight_version),
                    restarts,
                    self._beside,
                    self._engines.receiver(),
                    doing=f"syncing weights (version {self._weight_version})",
                    timeout_s=2 * self.config.sync.weight_sync_timeout_s + SYNC_ANSWER_S,
                ).wait()

        for of_rank in self._recovery.sync(send):
            self._synced.update(of_rank)

    def _catch_up(self, *, evaluating: bool) -> None:
        """Send the weights while the trainer is idle, so that engines that were restarted can serve.

        The version is the one that the others have, unless the trainer's weights are newer. During an evaluation, whose
        responses are of one version, newer ones are sent only if no engine is left; with `--deterministic` nothing is
        sent as long as another engine serves, because running requests would be interrupted.
        """
        newer = self._trained_at[self._weight_version] != self._rollouts_trained
        deterministic = self.config.run.deterministic
        if newer and deterministic and not self._recovery.any_serves:
            raise EngineError(
                "the last engine was lost while rollouts of older weights were generated: with --deterministic they"
                " cannot go on with newer ones"
            )
        if not ((deterministic or (newer and evaluating)) and self._recovery.any_serves):
            if newer:
                self._name_weights().wait()
            self._send_weights()

    def _announce(self, trained_at: dict[int, int]) -> PendingCall[None]:
        """Remember weight versions and tell the rollout process, which must know before it gets samples of them."""
        self._trained_at.update(trained_at)
        doing = "announcing weights to the rollout process"
        return self._rollout.begin(RolloutProcess.weights_added, trained_at, doing=doing)

    def start_evaluation(self, number: int) -> None:
        """Begin scoring the held-out sets under the engines' current weights; one evaluation at a time."""
        self.finish_evaluation()
        pending = self._rollout.begin(RolloutProcess.evaluate, number, doing=f"evaluating after {number} rollouts")
        self._evaluating = number, pending

    def finish_evaluation(self, *, wait: bool = True, before: float = math.inf) -> None:
        """Report the evaluation that was begun after less than `before` rollouts, if one runs.

        Without `wait` only if it has finished.
        """
        if self._evaluating is None or self._evaluating[0] >= before or not (wait or self._evaluating[1].finished):
            return
        (number, pending), self._evaluating = self._evaluating, None
        with timed(self._seconds, "time/wait_evaluation"):
            report = self._wait_rollout(pending, "evaluating")
        self.observer.eval_finished(number, report, self._trained_at)
        self._retention.evaluated(number, report.metrics)
        if self._saver is not None:
            self._saver.delete_superfluous()

    def evaluate(self, number: int) -> None:
        """Score the held-out sets under the engines' current weights."""
        self.start_evaluation(number)
        self.finish_evaluation()

    def save(self, rollouts_done: int) -> None:
        """Write a checkpoint that continues after `rollouts_done` rollouts, unless there is one already.

        With `--async-save` it is complete some time later, except for the last one.
        """
        if self._saver is not None and self._saver.newest_done != rollouts_done:
            self._save(self._saver, rollouts_done)

    def _save(self, saver: Saver, rollouts_done: int) -> None:
        self._token_log.finish()  # a run that is continued from here does not repeat these rollouts
        last = rollouts_done == self.config.num_rollout or self._is_preempted
        with saver.training_waits():
            saver.save(
                rollouts_done,
                self._weight_version,
                self._trained_at,
                background=self.config.checkpoint.async_save and not last,
            )

    @property
    def _is_preempted(self) -> bool:
        return self._preemption is not None and self._preemption.asked

    def stop_if_preempted(self, rollouts_done: int) -> None:
        """After SIGTERM: save a checkpoint, and end the run unless this was its last step.

        With `--deterministic` only when the engines have the newest weights, because a resumed run gives them those.

        Raises:
            PreemptedError: The checkpoint is complete.
        """
        current = self._trained_at.get(self._weight_version, rollouts_done) == rollouts_done
        if not self._is_preempted or (self.config.run.deterministic and not current):
            return
        self.finish_save()
        if rollouts_done > self.first_rollout:
            self.save(rollouts_done)
        if rollouts_done < self.config.num_rollout:
            self.finish_evaluation(before=rollouts_done)
            raise PreemptedError(f"preempted: ended by SIGTERM after {rollouts_done} rollouts, all of them saved")

    def finish_save(self, *, wait: bool = True) -> None:
        """Complete the checkpoint that is being written, if there is one; without `wait` only if it is written."""
        if self._saver is not None and self._saver.busy:
            with self._saver.training_waits():
                self._saver.finish(wait=wait)

    def save_model(self, root: Path) -> None:
        """Write the weights alone, as a checkpoint in `root` that another run can start from."""
        save_model(writer_for(root, self.config, self._plugins, self._run_dir), self._trainer)

    def export_hf(self, folder: Path) -> None:
        """Write the current weights as a complete Hugging Face folder.

        Completes the checkpoint of the same weights first, so that they are not lost if the export fails.
        """
        self.finish_save()
        saved = None if self._saver is None else self._saver.newest
        try:
            self._trainer.begin(TrainerProcess.export_hf, folder, doing=f"exporting {folder}").wait()
        except CheckpointError as error:
            if saved is None:
                raise
            raise CheckpointWriteError(
                f"{error} The run itself is saved: run the same command with --load {saved.parent}, or slime"
                f" convert {saved} {folder}, to export it without training again."
            ) from error
        self.observer.model_exported(folder)

    def finish_step(self, rollout: Rollout, train_metrics: dict[str, float]) -> None:
        """Report one step: the rollout's metrics, the trainer's, and where the seconds went."""
        if self._profiles is not None:
            self._profiles.stop()
        saving = {} if self._saver is None else self._saver.take_seconds()
        metrics = {**rollout.metrics, **train_metrics, **self._synced, **self._seconds, **saving}
        metrics["time/step"] = time.monotonic() - self._step_started
        metrics["weight_version"] = float(self._weight_version)
        self.observer.step_finished(rollout.number, metrics)
        if rollout.number + 1 == self.config.num_rollout:
            self._token_log.finish()
        self._retention.step_finished(rollout.number, with_prefix(metrics))
