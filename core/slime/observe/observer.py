"""`RunObserver`: the loop tells it what happened; it tells everyone who watches."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from slime.observe.excerpt import Excerpt
from slime.observe.memory import PeakMemory, gibibytes
from slime.observe.metrics import MetricsWriter
from slime.observe.report import write_report
from slime.observe.tensorboard import TensorBoardWriter
from slime.observe.terminal import Terminal, printable
from slime.observe.timing import kernel_overhead

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.plugins import PluginSet

logger = logging.getLogger(__name__)

#: an evaluation set's counts of lost samples; `eval/plugin/...` counts the same samples by component
_LOST = re.compile(r"eval/(?!plugin/)[^/]+/(failed|aborted)")
_SAMPLES = re.compile(r"eval/[^/]+/samples")

#: numbers of the run as a whole, which have no prefix
RUN_METRICS = frozenset(("weight_version",))


class EvalResult(Protocol):
    """What the observer reads of an evaluation report."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """`eval/NAME` is the mean reward of a set, `eval/NAME/...` its details."""
        ...

    @property
    def failures(self) -> Sequence[str]:
        """Why samples failed, most frequent reason first."""
        ...

    @property
    def seconds(self) -> float:
        """How long the evaluation took."""
        ...

    @property
    def weight_versions(self) -> Sequence[str]:
        """Weights that produced any token."""
        ...


def samples_lost(metrics: Mapping[str, float]) -> tuple[int, int]:
    """Samples of an evaluation that failed or were aborted, and all of them."""
    lost = sum(value for name, value in metrics.items() if _LOST.fullmatch(name))
    return int(lost), int(sum(value for name, value in metrics.items() if _SAMPLES.fullmatch(name)))


def with_prefix(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics under one naming rule: what has no prefix is the trainer's, `train/NAME`, but the run's own."""
    return {name if "/" in name or name in RUN_METRICS else f"train/{name}": value for name, value in metrics.items()}


class RunObserver:
    """Fans out to metrics file, TensorBoard, terminal and plugin observers.

    Watching never ends a run: what a sink raises is reported once, with its name, and the sink is then
    left alone.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        plugins: PluginSet | None = None,
        *,
        file: TextIO | None = None,
    ) -> None:
        """`file`: where the terminal output goes instead of standard output."""
        self._config = config
        self._run_dir = run_dir
        self._plugins = plugins
        last = config.rollout.num_rollout
        self.terminal = Terminal(None if not last else last - 1, file=file)
        self._broken: set[str] = set()
        self._metrics: MetricsWriter | None = None
        self._tensorboard: TensorBoardWriter | None = None
        self._memory = PeakMemory().start()
        self._started = time.monotonic()
        self._steps = 0
        self._overheads: list[float] = []
        self._generating: int | None = None
        with self._sink("metrics.jsonl"):
            self._metrics = MetricsWriter(run_dir)
        with self._sink("TensorBoard"):
            self._tensorboard = TensorBoardWriter(run_dir)

    @property
    def seconds(self) -> float:
        """Since the observer was made."""
        return time.monotonic() - self._started

    @property
    def peak_bytes(self) -> int:
        """Most memory the processes of the run held together so far."""
        return self._memory.peak_bytes

    # --- what happened -----------------------------------------------------------------------------

    def run_starting(self, what: str) -> None:
        """The processes are being started, which takes seconds to minutes."""
        with self._sink("terminal"):
            self.terminal.say(f"starting {what}", "dim")

    def run_started(self, config: RunConfig, run_dir: Path) -> None:
        """The run folder exists and the processes are up."""
        rollout = config.rollout
        description = (
            f"{rollout.num_rollout} rollouts of {rollout.rollout_batch_size} prompts"
            f" x {rollout.n_samples_per_prompt} samples, ready after {self.seconds:.1f} s"
        )
        with self._sink("terminal"):
            self.terminal.run_started(run_dir, description)
        self._call_plugins("slime_run_started", run_dir=run_dir, config=config)

    def progress(self, done: int, total: int) -> None:
        """`done` of `total` samples of the rollout being waited for are finished."""
        with self._sink("terminal"):
            self.terminal.progress("generating", done, total)

    def rollout_finished(
        self,
        number: int,
        metrics: Mapping[str, float],
        examples: Sequence[Excerpt] = (),
        failures: Sequence[str] = (),
        findings: Sequence[str] = (),
    ) -> None:
        """One rollout is ready to be trained on.  `findings`: what `--passive-checks` found out about components."""
        lost = int(metrics.get("rollout/failed", 0) + metrics.get("rollout/aborted", 0))
        every = self._config.run.log_samples_interval
        with self._sink("terminal"):
            self.terminal.samples_lost(f"rollout {number}", lost, int(metrics.get("rollout/samples", lost)), failures)
            for finding in findings:
                self.terminal.warn(f"rollout {number}: {printable(finding)}")
            if every and number % every == 0:
                self.terminal.sample(number, examples)
            self.terminal.progress(f"training on rollout {number}")

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """One rollout was generated and trained on.  `metrics` of the rollout, the trainer and `time/...`."""
        row = with_prefix(metrics)
        if "time/step" in row:
            row["time/kernel_overhead"] = kernel_overhead(row["time/step"], row)
            self._overheads.append(row["time/kernel_overhead"])
        self._steps += 1
        with self._sink("terminal"):
            self.terminal.step_finished(step, row)
        self._write(step, row)
        self._call_plugins("slime_step_finished", step=step, metrics=row)

    def eval_finished(self, step: int, report: EvalResult) -> None:
        """The held-out sets were scored under the weights after `step` rollouts."""
        with self._sink("terminal"):
            self.terminal.eval_finished(f"after {step} rollouts", report.metrics, report.seconds)
            self.terminal.samples_lost("evaluation", *samples_lost(report.metrics), report.failures)
            if len(versions := report.weight_versions) > 1:
                self.terminal.warn(f"evaluation: the engines answered with weights of versions {', '.join(versions)}")
        self._write(step, report.metrics)

    def checkpoint_saved(self, step: int, path: Path) -> None:
        """A checkpoint is complete on disk."""
        with self._sink("terminal"):
            self.terminal.checkpoint_saved(step, path)
        self._call_plugins("slime_checkpoint_saved", step=step, path=path)

    def model_exported(self, path: Path) -> None:
        """The model was written as a Hugging Face folder."""
        with self._sink("terminal"):
            self.terminal.say(f"model exported to {path}", "blue")

    def run_finished(self, outcome: str) -> None:
        """The run ended: "finished", "interrupted" or "failed".  Closes everything."""
        self._call_plugins("slime_run_finished", run_dir=self._run_dir, outcome=outcome)
        if self._plugins is not None:
            with self._sink("terminal"):
                for (plugin, hook), times in self._plugins.observers.failures.items():
                    self.terminal.warn(f"{hook}() of plugin {plugin} raised {times} time{'' if times == 1 else 's'}")
        for name, writer in (("metrics.jsonl", self._metrics), ("TensorBoard", self._tensorboard)):
            with self._sink(name):
                if writer is not None:
                    writer.close()
        with self._sink("report"):
            write_report(self._run_dir)
        peak = self._memory.stop()
        facts = [f"{self._steps} steps", f"{self.seconds:.0f} s", gibibytes(peak)]
        if self._overheads:
            mean = sum(self._overheads) / len(self._overheads)
            facts.append(f"kernel overhead {100 * mean:.1f}% of a step")
        with self._sink("terminal"):
            self.terminal.run_finished(self._run_dir, outcome, facts)

    # --- sinks -------------------------------------------------------------------------------------

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, writer in (("metrics.jsonl", self._metrics), ("TensorBoard", self._tensorboard)):
            with self._sink(name):
                if writer is not None:
                    writer.write(step, metrics)

    @contextmanager
    def _sink(self, name: str) -> Iterator[None]:
        """The boundary around one sink: its errors are told once and never reach the run."""
        try:
            yield
        except Exception as error:  # the boundary: attributes the error to the sink
            if name not in self._broken:
                self._broken.add(name)
                logger.warning("%s cannot be written: %s: %s", name, type(error).__name__, error, exc_info=True)

    def _call_plugins(self, hook: str, **arguments: object) -> None:
        if self._plugins is not None:
            self._plugins.observers.call(hook, **arguments)
