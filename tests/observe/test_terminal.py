"""What the terminal shows."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import ProgressColumn

from slime.cli.output import print_plain
from slime.observe.samples import examples_of
from slime.observe.step_line import COLUMNS, StepLine, number
from slime.observe.terminal import LOG_WIDTH, Terminal, progress_bar
from slime.types import Group, Sample, Status

METRICS = {column.metric: 0.5 for column in COLUMNS}


def terminal(width: int | None = None, last_step: int | None = 59) -> tuple[Terminal, io.StringIO]:
    file = io.StringIO()
    return Terminal(last_step, file=file, width=width), file


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_a_step_is_one_line_aligned_with_its_header(width: int) -> None:
    shown, file = terminal(width)
    for step in range(3):
        shown.step_finished(step, METRICS)
    lines = file.getvalue().splitlines()
    header = next(i for i, line in enumerate(lines) if line.lstrip().startswith("step"))
    steps = lines[header + 1 :]
    assert len(steps) == 3
    assert all(len(line) <= width for line in lines[header:])
    assert steps[0].startswith(" 0/59")
    assert len(steps[0]) == len(lines[header])
    assert "reward" in lines[header]


def test_a_narrow_terminal_keeps_the_most_important_columns() -> None:
    header, _ = list(StepLine(None).lines(0, METRICS, 34))[-2:]
    assert header.plain.split("  ")[-3:] == [" reward", " lp gap", "step s"]


def test_columns_without_a_metric_are_left_out() -> None:
    header, _ = list(StepLine(None).lines(0, {"train/loss": 1.0, "time/step": 2.0}, 200))[-2:]
    assert header.plain.split() == ["step", "loss", "step", "s"]


def test_the_legend_is_shown_once_and_the_header_again_after_a_page() -> None:
    shown, file = terminal(LOG_WIDTH)
    for step in range(30):
        shown.step_finished(step, METRICS)
    text = file.getvalue()
    assert text.count("to the reference per token") == 1
    assert text.count("lp gap  ") == 2


def test_new_metrics_cause_a_new_header() -> None:
    shown, file = terminal(LOG_WIDTH)
    critic_only = {name: value for name, value in METRICS.items() if name != "train/loss"}
    for step, metrics in enumerate([critic_only, critic_only, METRICS, METRICS]):
        shown.step_finished(step, metrics)
    headers = [line.split() for line in file.getvalue().splitlines() if line.split()[:2] == ["step", "reward"]]
    assert ["loss" in header for header in headers] == [False, True]


def test_a_step_without_a_weight_sync_keeps_the_header() -> None:
    shown, file = terminal(LOG_WIDTH)
    no_sync = {name: value for name, value in METRICS.items() if name != "time/sync_weights"}
    for step in range(8):
        shown.step_finished(step, METRICS if step % 2 else no_sync)
    rows = [line.split() for line in file.getvalue().splitlines()]
    headers = [row for row in rows if row[:2] == ["step", "reward"]]
    assert ["sync" in header for header in headers] == [False, True]
    assert [row.count("·") for row in rows[-7:]] == [0, 1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (0.27, "0.2700"),
        (2.1e-6, "2.1e-06"),
        (12.3456, "12.35"),
        (1234.5, "1234"),
        (math.nan, "nan"),
    ],
)
def test_numbers_fit_into_seven_characters(value: float, text: str) -> None:
    assert number(value) == text
    assert len(number(-value)) <= 8


def test_a_log_gets_neither_escape_codes_nor_a_bar() -> None:
    shown, file = terminal()
    for done in range(10):
        shown.progress("generating", done, 10)
    shown.step_finished(0, METRICS)
    shown.warn("something")
    assert "\x1b" not in file.getvalue()
    assert "generating" not in file.getvalue()


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_bar_and_removes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file = Screen()
    shown = Terminal(59, file=file, width=100)
    shown.progress("generating", 3, 10)
    assert "generating" in file.getvalue() and "3/10" in file.getvalue()
    shown.step_finished(0, METRICS)
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1


def test_the_bar_has_a_rate_and_the_time_left_or_a_note_that_fits() -> None:
    console = Console(file=Screen(), width=60, force_terminal=True)
    bar = progress_bar(console)
    clock = iter(range(100))
    bar.get_time = lambda: float(next(clock))  # a second at every look
    known = bar.add_task("generating", total=40, note="")
    for done in (4, 8, 12):
        bar.update(known, completed=done)
    [task] = bar.tasks
    assert task.speed is not None and 0 < task.speed <= 4
    column = bar.columns[-1]
    assert isinstance(column, ProgressColumn)
    shown = str(column.render(task))
    left = math.ceil(28 / task.speed)
    assert shown == f"━━━━━━·············· 12/40  {task.speed:.3g}/s  {left}s left"
    unknown = bar.add_task("starting engines", total=None, note="engine-0: " + "loading " * 20)
    noted = str(column.render(bar.tasks[unknown]))
    assert "engine-0: loading" in noted and noted.endswith("…")
    assert len("- starting engines ") + len(noted) <= 60


def test_a_response_cannot_control_the_terminal() -> None:
    shown, file = terminal()
    answer = "\x1b[2J\x07two\nlines"
    shown.examples(3, [Sample(prompt="1+1=[bold]", label="2", response=answer, reward=1.0, status=Status.COMPLETED)])
    text = file.getvalue()
    assert "\x1b" not in text and "\x07" not in text
    assert "1+1=[bold]" in text
    assert "two" in text and "lines" in text and "1.00 (completed)" in text


def test_a_terminal_without_unicode_gets_replacements_instead_of_an_error() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_plain(stream)
    shown = Terminal(59, file=stream)
    shown.examples(3, [Sample(prompt="π = ?", response="3", reward=1.0)])
    assert b"question | ? = ?" in raw.getvalue()


def test_an_evaluation_is_compared_with_the_first() -> None:
    shown, file = terminal()
    shown.eval_finished("after 0 rollouts", {"eval/held": 0.25, "eval/held/samples": 64.0}, 1.0)
    shown.eval_finished("after 60 rollouts", {"eval/held": 0.75, "eval/held/truncated_ratio": 0.5}, 1.0)
    assert file.getvalue().splitlines() == [
        "eval after 0 rollouts  1.0 s",
        "  set     mean  samples",
        "  held  0.2500       64",
        "eval after 60 rollouts  1.0 s",
        "  set     mean   change    cut",
        "  held  0.7500  +0.5000  50.0%",
    ]


def test_the_summary_lists_the_files_of_the_run_folder(tmp_path: Path) -> None:
    shown, file = terminal()
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "events.out.tfevents.123.host").touch()
    (tmp_path / "rollouts").mkdir()
    shown.run_finished(tmp_path, "finished", ["60 steps", "148 s", "3.1 GiB"])
    text = file.getvalue()
    assert "finished  60 steps, 148 s, 3.1 GiB" in text
    assert str(tmp_path) in text
    assert f"tensorboard --logdir {tmp_path.parent}" in text
    assert "rollouts/" in text


def test_the_examples_are_a_good_and_a_bad_answer_to_one_question() -> None:
    def sample(group: int, reward: float | None) -> Sample:
        return Sample(prompt=f"question {group}", reward=reward, status=Status.COMPLETED, tokens=[1, 2])

    groups = [
        Group(0, [sample(0, 1.0), sample(0, 1.0)]),
        Group(1, [sample(1, 0.0), sample(1, 1.0), sample(1, None)]),
    ]
    for rollout in range(3):
        examples = examples_of(groups, rollout)
        assert [(one.prompt, one.reward) for one in examples] == [("question 1", 1.0), ("question 1", 0.0)]
        assert not any(one.tokens for one in examples)
    assert [one.reward for one in examples_of(groups[:1], 7)] == [1.0]
    assert examples_of([Group(0, [sample(0, None)])], 0) == []


#: a run whose output has a reader that leaves after the first line
LEAVING = """
import logging, sys
from slime.observe.terminal import Terminal
logging.basicConfig(stream=sys.stderr, format="%(message)s")
shown = Terminal()
for number in range(2000):
    shown.say(f"line {number}")
print("went on", file=sys.stderr)
"""


@pytest.mark.slow
def test_the_run_goes_on_when_nobody_reads_its_output_any_more() -> None:
    with subprocess.Popen([sys.executable, "-c", LEAVING], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stderr is not None
        assert run.stdout.readline() == b"line 0\n"
        run.stdout.close()
        told = run.stderr.read().decode()
        assert run.wait(60) == 0
    assert told.splitlines()[-2:] == [
        "nobody reads standard output any more: the run goes on, and logs/driver.log has all lines",
        "went on",
    ]
