"""`RunObserver`: reports the events of a run to files, trackers, the terminal and plugins."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from slime.config.eval_sets import eval_sets
from slime.errors import ClusterError, DiskFullError, SlimeError, disk_full, is_disk_full
from slime.errors.raised import ONLY_IN_LOGS, Raised
from slime.observe.eval_results import write_results
from slime.observe.log import begin_in_logs, last_log_line, start_log
from slime.observe.memory import PeakMemory
from slime.observe.metrics import MetricsWriter, earlier_metrics, eval_set_names, read_metrics
from slime.observe.sizes import gibibytes
from slime.observe.terminal import Terminal, printable
from slime.observe.timing import kernel_overhead
from slime.observe.trackers import TrackerThread, close_all
from slime.plugin import Context
from slime.registry.resolve import Use, components_used

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.errors import SlimeError
    from slime.plugin.watchers import Panel
    from slime.registry.plugin_set import PluginSet
    from slime.rollout.evaluation import EvalReport
    from slime.rollout.record import Rollout

logger = logging.getLogger(__name__)

#: seconds between two lines about a slow start, where there is no progress bar
STILL_EVERY_S = 10.0
_FILE_ONLY = {ONLY_IN_LOGS: True}
#: metrics of the run as a whole, which have no prefix
RUN_METRICS = frozenset(("synced_bytes", "weight_version"))


def start_trackers(config: RunConfig, run_dir: Path, plugins: PluginSet) -> list[TrackerThread]:
    """The run's trackers, each being built in its own thread."""

    def start(use: Use) -> TrackerThread:
        context = Context(config.run.seed, run_dir, logging.getLogger(f"slime.tracker.{use.name}"), config)
        build = partial(plugins.build, use.kind, use.name, use.options, context)
        return TrackerThread(f"tracker {use.name}", build, folder=run_dir)

    return [start(use) for use in components_used(config) if use.kind == "tracker"]


def samples_lost(metrics: Mapping[str, float]) -> tuple[int, int]:
    """How many samples of an evaluation failed or were aborted, and how many it had."""
    sets = eval_set_names(metrics)
    failed, aborted, samples = (
        int(sum(metrics.get(f"eval/{name}/{count}", 0) for name in sets)) for count in ("failed", "aborted", "samples")
    )
    return failed + aborted, samples


def with_prefix(metrics: Mapping[str, float]) -> dict[str, float]:
    """Add `train/` to the metrics without a prefix, which are the trainer's, except `RUN_METRICS`."""
    return {name if "/" in name or name in RUN_METRICS else f"train/{name}": value for name, value in metrics.items()}


class RunObserver:
    """Reports events to the metrics file, the trackers, the terminal and the plugins' observer hooks.

    Observing never ends a run: errors of a sink, such as a full disk, are logged once with its name.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        plugins: PluginSet | None = None,
        *,
        file: TextIO | None = None,
        records: bool = True,
    ) -> None:
        """Open the run's records and begin to measure memory.

        Args:
            config: The run's configuration.
            run_dir: The run folder.
            plugins: The plugins whose observer hooks are called.
            file: Where the terminal output goes instead of standard output.
            records: Whether numbers are written to `metrics.jsonl` and to the trackers.
        """
        self._config = config
        self._run_dir = run_dir
        self._plugins = plugins
        last = config.rollout.num_rollout
        self._log = start_log(run_dir, verbose=config.run.verbose)
        self.terminal = Terminal(None if not last else last - 1, file=file, quiet=config.run.quiet)
        #: the newest checkpoint that this run can be continued from, and its number of rollouts
        self.saved: tuple[int, Path] | None = None
        self._broken: set[str] = set()
        self._metrics: MetricsWriter | None = None
        self._trackers: list[TrackerThread] = []
        self._memory = PeakMemory().start()
        self._started = self._attempt_started = time.monotonic()
        self._waiting_for, self._told_at = "", self._started
        self._steps = 0
        #: rollouts that were trained on when the present attempt began, and are now
        self._began = self._done = 0
        #: how often the run, or parts of it, were restarted: "run", "engine", "router"
        self.restarts: Counter[str] = Counter()
        self._restarted: dict[str, float] = {}
        #: parts that are being restarted, and the kind of each
        self._away: dict[str, str] = {}
        #: one line for each restart of the run
        self._retold: list[str] = []
        #: the sum of the kernel overheads of steps, and how many there were
        self._overhead, self._overheads = 0.0, 0
        if records:
            with self._sink("metrics.jsonl"):
                self._metrics = MetricsWriter(run_dir)
            if plugins is not None:
                self._trackers = start_trackers(config, run_dir, plugins)

    @property
    def seconds(self) -> float:
        """Seconds since the observer was created."""
        return time.monotonic() - self._started

    @property
    def attempt_seconds(self) -> float:
        """Seconds since the present attempt at the run began."""
        return time.monotonic() - self._attempt_started

    # --- events ------------------------------------------------------------------------------------

    def starting(self, what: str) -> None:
        """Processes are being started, which takes seconds to minutes."""
        with self._sink("terminal"):
            self.terminal.say((f"starting {what}", "dim"))
            self.terminal.progress(f"starting {what.partition(',')[0]}")

    def still_starting(self, part: str) -> None:
        """The run waits for a part to start: shows which, since when, and the last line of the newest log.

        May be called often. Where there is no progress bar, a line is printed every `STILL_EVERY_S` seconds.
        """
        if part != self._waiting_for:
            self._waiting_for, self._told_at = part, time.monotonic()
        quiet_s = time.monotonic() - self._told_at
        with self._sink("terminal"):
            if self.terminal.live:
                self.terminal.progress(f"starting {part}", note=last_log_line(self._run_dir / "logs"))
            elif quiet_s >= STILL_EVERY_S:
                self._told_at = time.monotonic()
                last = last_log_line(self._run_dir / "logs")
                text = f"  {self.attempt_seconds:.0f} s: starting {part}{f'; {last}' if last else ''}"
                self.terminal.say((text, "dim"))

    def resumed(self, path: Path, done: int) -> None:
        """The run continues from the checkpoint at `path`, saved after `done` rollouts."""
        self.saved, self._began, self._done = (done, path), done, done
        with self._sink("terminal"):
            self.terminal.say(
                ("resumed ", "blue"), f"from {path}, after {done} rollouts: continues with rollout {done}"
            )
        with self._sink("metrics.jsonl"):
            if self._metrics is not None:
                for row in earlier_metrics(path, self._run_dir, done):
                    step, numbers = row["step"], {name: n for name, n in row.items() if n is not None}
                    self._metrics.append(row)
                    for tracker in self._trackers:
                        tracker.log(step, {n: v for n, v in numbers.items() if n not in ("step", "unix_time")})
                for row in read_metrics(self._run_dir):
                    self.terminal.first_evaluation({name: n for name, n in row.items() if n is not None})

    def ending(self, error: SlimeError) -> None:
        """The run, or an attempt at it, ends because of `error`; its processes are being ended, which takes seconds."""
        if isinstance(error, ClusterError):  # An engine may be missed before its node is: that is one restart.
            self.restarts.subtract(self._away.values())
        self._away.clear()
        with self._sink("terminal"):
            self.terminal.say((f"ending the run: {str(error).partition(chr(10))[0]}", "red"))

    def restarting(self, cause: str, saved: tuple[int, Path] | None) -> None:
        """All processes have ended, and the run starts again.

        Args:
            cause: What ended it, in one line.
            saved: The checkpoint that it continues from, and its number of rollouts; None if this run has written none.
        """
        self.saved, self._attempt_started = saved, time.monotonic()
        begins = self._began if saved is None else saved[0]
        repeated, self._done = max(0, self._done - begins), begins
        start = "where it began" if saved is None else str(saved[1])
        self.restarts["run"] += 1
        self._restarted["restarts/run"] = self._restarted.get("restarts/run", 0.0) + 1
        number = f"{self.restarts.total()} of {self._config.cluster.max_restarts}"
        told = f"restart {number}, from {start}, {repeated} rollouts are repeated; cause: {cause}"
        self._retold.append(told)
        with self._sink("terminal"):
            self.terminal.hide_progress()
            self.terminal.say((told, "yellow"), always=True)
        with self._sink("logs"):
            begin_in_logs(self._run_dir)

    def part_lost(self, kind: str, part: str, how: str) -> None:
        """An engine or the router, `part`, is in trouble and is restarted; only the first line of `how` is shown."""
        first = how.partition("\n")[0]
        self.restarts[kind] += 1
        self._away[part] = kind
        self._restarted[f"restarts/{kind}"] = self._restarted.get(f"restarts/{kind}", 0.0) + 1
        most = self._config.cluster.max_restarts
        with self._sink("terminal"):
            first = first.partition(" Last lines of ")[0]
            what = f"{part} ({self.restarts.total()} of {most} restarts): {first}"
            self.terminal.say(("restarting ", "yellow"), printable(what), always=True)
        logger.warning("%s", how, extra=_FILE_ONLY)

    def part_dropped(self, part: str, how: str) -> None:
        """An engine that is not the run's own is lost, and the run goes on without it."""
        first = how.partition("\n")[0]
        with self._sink("terminal"):
            self.terminal.say(("going on without ", "yellow"), printable(f"{part}: {first}"), always=True)
        logger.warning("%s", how, extra=_FILE_ONLY)

    def part_back(self, part: str, seconds: float, repeated: int) -> None:
        """A part that was restarted is in service again, after so many requests were sent again."""
        self._away.pop(part, None)
        self._restarted["restarts/seconds"] = self._restarted.get("restarts/seconds", 0.0) + seconds
        requests = "1 request" if repeated == 1 else f"{repeated} requests"
        with self._sink("terminal"):
            text = f"{part} is back after {seconds:.1f} s, {requests} repeated"
            self.terminal.say((text, "yellow"), always=True)

    def run_started(self, config: RunConfig, run_dir: Path) -> None:
        """The run folder exists and the processes have started."""
        rollout = config.rollout
        description = (
            f"{rollout.num_rollout} rollouts of {rollout.rollout_batch_size} prompts"
            f" x {rollout.n_samples_per_prompt} samples, ready after {self.attempt_seconds:.1f} s"
        )
        if config.names_layers:
            description += f", layers: {config.layer_backend}"
        with self._sink("terminal"):
            self.terminal.say(("run ", "dim"), (str(run_dir), "bold"), (f"  {description}", "dim"))
        self._call_plugins("slime_run_started", run_dir=run_dir, config=config)

    def progress(self, activity: str, done: int, total: int) -> None:
        """`done` of `total` samples are finished; `activity` is "generating" or "evaluating"."""
        with self._sink("terminal"):
            self.terminal.progress(activity, done, total)

    def rollout_finished(self, rollout: Rollout) -> None:
        """One rollout is ready to be trained on."""
        number, metrics = rollout.number, rollout.metrics
        lost = int(metrics.get("rollout/failed", 0) + metrics.get("rollout/aborted", 0))
        samples = int(metrics.get("rollout/samples", lost))
        every = self._config.run.log_samples_interval
        with self._sink("terminal"):
            self.terminal.samples_lost(f"rollout {number}", lost, samples, rollout.failures, rollout.tracebacks)
            for finding in rollout.findings:
                self.terminal.warn(f"rollout {number}: {printable(finding)}")
            if every and number % every == 0:
                self.terminal.examples(number, rollout.examples)
            self.terminal.progress(f"training on rollout {number}")

    def columns_lost(self, rollout: int, problem: str) -> None:
        """The per-token columns of a rollout could not be written. Told once, until one is written again."""
        with self._sink("terminal"):
            self.terminal.warn(
                f"rollout {rollout}: its per-token columns were not written, and the run goes on: {printable(problem)}"
            )

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """One rollout was generated and trained on.

        Args:
            step: The rollout's number.
            metrics: Metrics of the rollout and the trainer, and the seconds of each phase (`time/...`).
        """
        row = with_prefix({**metrics, **self._restarted})
        self._restarted.clear()
        if "time/step" in row:
            row["time/kernel_overhead"] = kernel_overhead(row["time/step"], row)
            self._overhead, self._overheads = self._overhead + row["time/kernel_overhead"], self._overheads + 1
        self._steps += 1
        self._done = step + 1
        with self._sink("terminal"):
            self.terminal.step_finished(step, row)
        self._write(step, row)
        self._call_plugins("slime_step_finished", step=step, metrics=row)

    def eval_finished(self, step: int, report: EvalReport, trained_at: Mapping[int, int]) -> None:
        """The held-out sets were scored under the weights after `step` rollouts, unless engines were lost meanwhile.

        Args:
            step: How many rollouts had been trained on.
            report: The results.
            trained_at: Weight version -> rollouts that had been trained on.
        """
        with self._sink("terminal"):
            self.terminal.eval_finished(f"after {step} rollouts", report.metrics, report.seconds)
            self.terminal.samples_lost("evaluation", *samples_lost(report.metrics), report.failures, report.tracebacks)
            versions = report.weight_versions
            right = [version for version, done in trained_at.items() if done == step]
            if len(versions) > 1 or not set(versions) <= {str(version) for version in right or versions}:
                # The engines that had the right ones may have been lost, and the next ones got newer weights.
                told = f"evaluation after {step} rollouts: the engines answered with weights of versions"
                wanted = f"; those after {step} rollouts are {', '.join(map(str, right))}" if right else ""
                self.terminal.warn(f"{told} {', '.join(versions)}{wanted}")
        self._write(step, report.metrics)

    def checkpoint_saved(self, step: int, path: Path, note: str = "") -> None:
        """A checkpoint is complete on disk; `note` says how long that took, if training continued meanwhile."""
        self.saved = step, path
        with self._sink("terminal"):
            said = [(f"  {note}", "dim")] if note else []
            self.terminal.say((f"checkpoint after {step} rollouts  ", "blue"), str(path), *said)
        self._call_plugins("slime_checkpoint_saved", step=step, path=path)

    def model_exported(self, path: Path) -> None:
        """The model was written as a Hugging Face folder."""
        with self._sink("terminal"):
            self.terminal.say((f"model exported to {path}", "blue"))

    def run_finished(self, outcome: str, *, reports: bool = True) -> None:
        """The run ended: "finished", "interrupted" or "failed". Closes everything.

        `reports`: whether there is time for what plugins make of a whole run, which comes after all else.
        """
        error = sys.exception()
        if isinstance(error, Exception):
            logger.error("%s", error, exc_info=None if isinstance(error, SlimeError) else error, extra=_FILE_ONLY)
        self._call_plugins("slime_run_finished", run_dir=self._run_dir, outcome=outcome)
        failures = {} if self._plugins is None else self._plugins.observer_failures
        problems = [f"errors in {hook}() of plugin {plugin}: {times}" for (plugin, hook), times in failures.items()]
        problems += close_all(self._trackers, outcome)
        with self._sink("metrics.jsonl"):
            if self._metrics is not None:
                self._metrics.close()
        facts = [f"{self._steps} steps", f"{self.seconds:.0f} s"]
        peak_bytes = self._memory.stop()
        # On an existing cluster, the run's processes do not descend from this one.
        if self._config.cluster.ray_address is None:
            facts.append(gibibytes(peak_bytes))
        if self.restarts:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.restarts.items())
            facts.append(f"restarted: {kinds}")
        if self._overheads:
            facts.append(f"kernel overhead {100 * self._overhead / self._overheads:.1f}% of a step")
        with self._sink("terminal"):
            for told in self._retold:
                self.terminal.say(told, always=True)
            for problem in problems:
                self.terminal.warn(printable(problem))
            self.terminal.run_finished(self._run_dir, outcome, facts, self._saved_state(outcome))
        try:
            if reports:
                self._report(outcome)
        finally:
            self._log.close()

    def _report(self, outcome: str) -> None:
        arguments = {"run_dir": self._run_dir, "outcome": outcome, "build_panel": self._build_panel}
        for written in self._call_plugins("slime_run_closed", **arguments):
            with self._sink("terminal"):
                for name, what in written.items():
                    self.terminal.file_written(name, what)

    def _build_panel(self, name: str, options: Mapping[str, Any], run_dir: Path) -> Panel:
        assert self._plugins is not None
        context = Context(self._config.run.seed, run_dir, logging.getLogger(f"slime.panel.{name}"), self._config)
        panel: Panel = self._plugins.build("panel", name, options, context)
        return panel

    def _saved_state(self, outcome: str) -> str:
        """What is saved of a run that did not finish; the command line says how to continue it."""
        if outcome == "finished" or self.saved is None:
            return ""
        done, path = self.saved
        return f"saved: {done} rollouts, in {path}"

    # --- sinks -------------------------------------------------------------------------------------

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._sink("metrics.jsonl"):
            if self._metrics is not None:
                self._metrics.write(step, metrics)
        for tracker in self._trackers:
            tracker.log(step, metrics)

    @contextmanager
    def _sink(self, name: str) -> Iterator[None]:
        """Log the first error of a sink; none of its errors reaches the run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - attributed to the sink
            if name not in self._broken:
                self._broken.add(name)
                logger.warning("%s cannot be written; the run continues: %s", name, told(error, self._run_dir / name))

    def _call_plugins(self, hook: str, **arguments: object) -> list[Any]:
        return [] if self._plugins is None else self._plugins.observe(hook, **arguments)


def told(error: Exception, path: Path) -> str:
    """One line about what writing to `path` raised; a traceback goes to the log."""
    if isinstance(error, DiskFullError):
        return str(error)
    if is_disk_full(error):
        return disk_full(error, path)
    raised = Raised.of(error)
    raised.log(path.name)
    return raised.error


class EvaluationObserver(RunObserver):
    """Observes a run without training: shows what it does and writes the results of its evaluation.

    A context manager that restores the terminal.
    """

    def __init__(self, config: RunConfig, run_dir: Path, model: str) -> None:
        """`model`: the model folder or checkpoint whose weights are used."""
        super().__init__(config, run_dir, records=False)
        self._model = model

    def __enter__(self) -> EvaluationObserver:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.stop()
        self.terminal.hide_progress()
        self._log.close()

    def run_started(self, config: RunConfig, run_dir: Path) -> None:
        """The processes have started; nothing is shown."""

    def eval_finished(self, step: int, report: EvalReport, trained_at: Mapping[int, int]) -> None:
        """The held-out sets were scored under weights trained on `step` rollouts. Raises `OSError`."""
        del trained_at
        facts = {"weights": self._model, "rollouts_done": step, "seconds": report.seconds, "failures": report.failures}
        path = write_results(self._run_dir, eval_sets(self._config), report.metrics, report.files, **facts)
        self.terminal.eval_finished(f"of {self._model}", report.metrics, report.seconds)
        self.terminal.samples_lost("evaluation", *samples_lost(report.metrics), report.failures, report.tracebacks)
        self.terminal.say((f"every number: {path}  every sample: {path.parent / 'rollouts'}", "dim"))
