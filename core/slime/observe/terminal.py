"""The terminal output of a run."""

from __future__ import annotations

import logging
import os
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from slime.errors.raised import ONLY_IN_LOGS
from slime.observe.eval_results import eval_table
from slime.observe.metrics import eval_set_names
from slime.observe.samples import question_text
from slime.observe.step_line import StepLine, duration
from slime.types import Sample

logger = logging.getLogger(__name__)

#: width of the output, in characters, if it is not a terminal
LOG_WIDTH = 160
#: width of the progress bar
BAR = 20
#: at most this many lines of a question or answer are shown
EXCERPT_LINES = 6

#: what a run folder may hold, in the order it is listed
CONTENTS: tuple[tuple[str, str], ...] = (
    ("config.toml", "the whole configuration: slime train {folder}/config.toml --run-name NAME"),
    ("plugins.json", "the plugins of the run, with versions"),
    ("metrics.jsonl", "every number of every step"),
    ("events.out.tfevents.*", "for TensorBoard: tensorboard --logdir {parent}"),
    ("abandoned_*", "what earlier attempts recorded of steps that were taken again"),
    ("rollouts", "every sample: prompt, response, label, reward, status"),
    ("checkpoints", "saved states of the run"),
    ("hf", "the trained model in Hugging Face format"),
    ("profiles", "profiles of steps: open them at https://ui.perfetto.dev"),
    ("logs", "logs of all processes"),
)


def printable(text: str) -> str:
    """`text` without control characters, which could change the terminal; newlines and tabs are kept."""
    return "".join(char if char in "\n\t" or unicodedata.category(char)[0] != "C" else "�" for char in text)


class _Output(Console):
    """A console that outlives its reader."""

    def on_broken_pipe(self) -> None:
        """The reader is gone, as of `slime train | head`: the run goes on. rich would end the process."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)
        logger.warning("nobody reads standard output any more: the run goes on, and logs/driver.log has all lines")


class _Pace(ProgressColumn):
    """How much is done, how fast, and the time left; where that is unknown, the time taken and a note."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._width = console.width

    def render(self, task: Task) -> Text:
        if task.total is None:
            text = f"{duration(task.elapsed or 0.0)}  {task.fields.get('note', '')}"
        else:
            filled = round(BAR * task.completed / max(1.0, task.total))
            text = f"{'━' * filled}{'·' * (BAR - filled)} {task.completed:.0f}/{task.total:.0f}"
            if task.speed and (left := task.time_remaining) is not None:
                text += f"  {task.speed:.3g}/s  {duration(left)} left"
        room = max(1, self._width - len(task.description) - 4)
        return Text(text if len(text) <= room else f"{text[: room - 1]}…")


def progress_bar(console: Console) -> Progress:
    """A bar that vanishes in the end. Tasks without a total show their field `note`."""
    columns = SpinnerColumn("line"), TextColumn("{task.description}", style="dim"), _Pace(console)
    return Progress(*columns, console=console, transient=True, refresh_per_second=4)


class Terminal:
    """Shows progress, a line for each step, examples, evaluations and the final summary.

    A terminal gets a progress bar and colours; a file or pipe gets plain lines without escape codes.
    """

    def __init__(
        self,
        last_step: int | None = None,
        *,
        file: TextIO | None = None,
        width: int | None = None,
        quiet: bool = False,
    ) -> None:
        """Open the output.

        Args:
            last_step: Shown behind the step, as in `3/59`.
            file: Where the output goes instead of standard output.
            width: In characters, instead of the terminal's.
            quiet: Show evaluations, warnings and the end only.
        """
        self.quiet = quiet
        stream = sys.stdout if file is None else file
        self._console = _Output(file=stream, highlight=False, width=width)
        if not self._console.is_terminal and width is None:
            columns = os.environ.get("COLUMNS", "")
            width = int(columns) if columns.isdecimal() and int(columns) else LOG_WIDTH
            self._console = _Output(file=stream, highlight=False, width=width)
        self._line = StepLine(last_step)
        self._first_eval: dict[str, float] = {}
        self._progress: Progress | None = None

    @property
    def live(self) -> bool:
        """Whether the output is a terminal that can show a progress bar."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def say(self, *parts: str | tuple[str, str], always: bool = False) -> None:
        """Print one line, unless the output is quiet; each part is a text, or a text with its style."""
        self._print(Text.assemble(*parts), always=always)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.say((f"warning: {text}", "yellow"), always=True)

    def progress(self, activity: str, done: int | None = None, total: int | None = None, note: str = "") -> None:
        """Show what is being done, as a bar if `total` is known, and a `note`; only on a terminal."""
        if not self.live or self.quiet:
            return
        if self._progress is None:
            self._progress = progress_bar(self._console)
            self._progress.start()
        for task in self._progress.tasks:
            if task.description != activity:
                self._progress.remove_task(task.id)
        if not self._progress.tasks:
            self._progress.add_task(activity, total=total, completed=done or 0, note=note)
        self._progress.update(self._progress.task_ids[0], completed=done, total=total, note=note)

    def hide_progress(self) -> None:
        """Remove the progress bar and restore the cursor."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's line, below a header where one is due."""
        self.hide_progress()
        for line in self._line.lines(step, metrics, self._console.width):
            self._print(line)

    def samples_lost(
        self, what: str, lost: int, of: int, reasons: Sequence[str], tracebacks: Sequence[str] = ()
    ) -> None:
        """Warn that samples failed or were aborted, with the most frequent reasons, and new tracebacks."""
        if lost:
            because = f": {printable('; '.join(reasons))}" if reasons else ""
            self.warn(f"{what}: {lost} of {of} samples failed or were aborted{because}")
        for text in tracebacks:
            self.say((printable(text), "yellow"), always=True)

    def examples(self, rollout: int, samples: Sequence[Sample]) -> None:
        """Show a question with its answers and their rewards."""
        if not samples:
            return
        self.say((f"  a sample of rollout {rollout}", "dim"))
        self._field("question", question_text(samples[0].prompt), "")
        if samples[0].label is not None:
            self._field("label", samples[0].label, "")
        for sample in samples:
            reward = sample.reward_value or 0.0
            self._field("answer", sample.response, "green" if reward > 0 else "red")
            self._field("reward", f"{reward:.2f} ({sample.status.value})", "dim")

    def eval_finished(self, what: str, metrics: Mapping[str, float], seconds: float) -> None:
        """Print the results of an evaluation of `what`: a line for each evaluation set."""
        self.hide_progress()
        self.say((f"eval {what}", "magenta"), (f"  {seconds:.1f} s", "dim"), always=True)
        for line in eval_table(metrics, self._first_eval, self._console.width):
            self._print(line, always=True)
        self.first_evaluation(metrics)

    def first_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Later evaluations show their change since this one, for each evaluation set that has none before it."""
        for name in eval_set_names(metrics):
            self._first_eval.setdefault(f"eval/{name}", metrics[f"eval/{name}"])

    def run_finished(self, run_dir: Path, outcome: str, facts: Sequence[str], saved: str = "") -> None:
        """Print how the run ended, what is `saved` of it, where the run folder is and what is in it."""
        self.hide_progress()
        style = "bold green" if outcome == "finished" else "bold red"
        self.say((outcome, style), (f"  {', '.join(facts)}" if facts else "", ""), always=True)
        if saved:
            self.say(saved, always=True)
        self.say("run folder ", (str(run_dir), "bold"), always=True)
        present = [(name, meaning) for name, meaning in CONTENTS if any(run_dir.glob(name))]
        for name, meaning in present:
            shown = name.removesuffix(".*") + ("/" if (run_dir / name).is_dir() else "")
            self.say(f"  {shown:<22}", (meaning.format(parent=run_dir.parent, folder=run_dir), "dim"))

    def file_written(self, name: str, what: str) -> None:
        """Print that a file is in the run folder too, which was written after the summary."""
        self.say(f"  {name:<22}", (what, "dim"))

    def _field(self, name: str, text: str, style: str) -> None:
        lines = printable(text).split("\n")
        shown = lines[:EXCERPT_LINES]
        room = max(20, self._console.width - 14)
        for position, line in enumerate(shown):
            title = name if position == 0 else ""
            line = line if len(line) <= room else line[: room - 1] + "…"
            self.say((f"  {title:>8} │ ", "dim"), (line, style))
        if len(lines) > len(shown):
            self.say((f"  {'':>8} │ … {len(lines) - len(shown)} more lines", "dim"))

    def _print(self, text: Text, *, always: bool = False) -> None:
        logger.info("%s", text.plain, extra={ONLY_IN_LOGS: True})
        if self.quiet and not always:
            return
        # Lines of a log are never wrapped, because tools read it line by line.
        self._console.print(text, soft_wrap=not self._console.is_terminal)
