"""`slime show`: a run in the terminal: its curves, what went wrong, its worst and best samples."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

from slime.cli.arguments import Arguments
from slime.cli.text_layout import count, hanging
from slime.errors import ConfigError, did_you_mean
from slime.observe.terminal import printable
from slime_viewer import queries
from slime_viewer.alerts import Counts, alerts
from slime_viewer.filters import EXAMPLE, Condition, read_filter
from slime_viewer.index import RunIndex, message_text, open_index, prompt_text
from slime_viewer.panels import evaluation_sets, panels
from slime_viewer.progress import progress
from slime_viewer.run_files import RunFolder
from slime_viewer.verdict import LOOK, Verdict, verdict

_HELP = f"""\
usage: slime show RUN                   curves, evaluations, what went wrong
       slime show RUN --metric NAME     one metric, step by step
       slime show RUN [--step N] [--where FILTER] [--worst K | --best K]
                      [--full]          samples

RUN is a run folder, of a run that goes on or has ended; nothing in it is
changed. --where makes an index of its samples, in ~/.cache/slime.

  --step N         of rollout N
  --where FILTER   such as '{EXAMPLE}';
                   of training, unless it names a kind
  --worst K        the K samples with the lowest reward [3]
  --best K         the K samples with the highest reward
  --full           whole texts
  --help           this text

Fields of a filter: {", ".join((*list(queries.SORTS)[:6],))},
group, index, version, status, kind (train, dropped, eval, failed), set,
finish, dropped, failure. Words, or a text in quotes, are searched in prompts
and answers.
"""
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH, _TEXT = 40, 1200
#: bytes of samples that are read for the overview
_READ_BYTES = 32 * 2**20


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code. Raises `ConfigError`."""
    if not argv or {"-h", "--help"} & set(argv):
        print(_HELP, end="")
        return 0 if argv else 2
    parser = Arguments("slime show")
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("--metric")
    parser.add_argument("--step", type=int)
    parser.add_argument("--where", default="")
    parser.add_argument("--worst", type=int)
    parser.add_argument("--best", type=int)
    parser.add_argument("--full", action="store_true")
    stated = parser.read(_with_filter(argv))
    folder = RunFolder(stated.run)
    wanted = (stated.step, stated.worst, stated.best)
    samples = bool(stated.where or stated.full) or any(one is not None for one in wanted)
    if stated.worst is not None and stated.best is not None:
        raise ConfigError("slime show takes one of --worst and --best")
    for name, number in (("--worst", stated.worst), ("--best", stated.best)):
        if number is not None and number < 1:
            raise ConfigError(f"slime show {name} {number}: expected 1 or more")
    if samples and stated.metric:
        raise ConfigError("slime show --metric shows no samples; drop the other options")
    if samples:
        most, best = (
            (3 if stated.worst is None else stated.worst, False) if stated.best is None else (stated.best, True)
        )
        lines = _samples(folder, stated.step, stated.where, most, best=best, full=stated.full)
    else:
        folder.metrics.refresh()
        lines = _metric(folder, stated.metric) if stated.metric else _overview(folder)
    for line in lines:
        print(printable(line))
    return 0


def _with_filter(argv: Sequence[str]) -> list[str]:
    """The words with `--where FILTER` as one: a filter may begin with a `-`, which would be taken for an option."""
    words = list(argv)
    for number, word in enumerate(words[:-1]):
        if word == "--where" and words[number + 1].startswith("-") and not words[number + 1].startswith("--"):
            words[number : number + 2] = [f"--where={words[number + 1]}"]
            break
    return words


# --- the run -----------------------------------------------------------------------------------------


def _overview(folder: RunFolder) -> Iterator[str]:
    metrics = folder.metrics
    gone = progress(folder)
    judged = verdict(folder, gone, alerts(metrics, _counts(folder)))
    yield f"{folder.path}  {gone.state}, {gone.steps}"
    yield from _judged(folder, judged)
    used = folder.plugins().get("used", {})
    for slot in ("estimator", "reward", "generator", "datasource"):
        if isinstance(used, dict) and isinstance(used.get(slot), dict):
            yield f"  {slot:<12}{used[slot].get('id')}  ({used[slot].get('distribution')} {used[slot].get('version')})"
    for panel in panels(metrics):
        for number, name in enumerate(panel.metrics):
            steps, values = metrics.series(name)
            if number == 0:
                yield f"{panel.title}"
            change = f"{_number(values[0])} -> {_number(values[-1])}" if values else "· (no finite value)"
            yield f"  {name:<28}{sparkline(values):<{_WIDTH}}  {change}"
    for name in evaluation_sets(metrics):
        steps, values = metrics.series(f"eval/{name}")
        ends = {end: dict(zip(*metrics.series(f"eval/{name}/{end}"), strict=True)) for end in ("low", "high")}
        shown = [
            f"{_number(value)} ({_number(ends['low'].get(step))} to {_number(ends['high'].get(step))}) after {step}"
            for step, value in zip(steps, values, strict=True)
        ]
        yield f"Evaluation {name}: " + ", ".join(shown if len(shown) < 4 else [shown[0], "…", *shown[-2:]])
    events = folder.events()
    if events:
        yield f"Log: {count(len(events), 'warning or error')}, the last ones"
        yield from (f"  {event.time} {event.level}: {event.text}" for event in events[-3:])
    for problem in folder.problems():
        yield f"left out: {problem}"
    yield f"again: {folder.command()}"


def _judged(folder: RunFolder, judged: Verdict) -> Iterator[str]:
    """The verdict in lines."""
    yield judged.title
    for reason in judged.reasons:
        yield from hanging("    ", reason)
    if judged.command:
        yield f"    {judged.command}"
        yield from hanging("    ", judged.command_note)
    if judged.alerts and judged.state != LOOK:
        yield f"Worth a look: {len(judged.alerts)}"
    for alert in judged.alerts:
        yield from hanging("  ! ", alert.text)
        yield from hanging("    ", alert.advice)
        if alert.filter:
            yield f"    {shlex.join(['slime', 'show', str(folder.path), '--where', alert.filter])}"


def _counts(folder: RunFolder) -> Counts | None:
    """What the samples of a small run show; larger ones would have to be indexed first."""
    files = [file for file in folder.sample_files() if file.kind == "train"]
    try:
        if sum(file.path.stat().st_size for file in files) > _READ_BYTES:
            return None
    except OSError:
        return None
    with closing(RunIndex(folder, None, files, words=False)) as index:
        index.refresh()
        return queries.counts(index)


def _metric(folder: RunFolder, name: str) -> Iterator[str]:
    known = folder.metrics.names
    if name not in known:
        near = did_you_mean(name, known) or f" It has: {', '.join(known) or 'none'}"
        raise ConfigError(f"{folder.path} has no metric {name!r}.{near}")
    steps, values = folder.metrics.series(name)
    yield f"{name}  {sparkline(values, 60)}"
    for step, value in zip(steps, values, strict=True):
        yield f"{step:>8}  {_number(value)}"


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """A curve of `width` characters or fewer; each shows the mean of its share of the values."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(column * len(values) / width) for column in range(width + 1)]
    means = [math.fsum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] if span > 0 else _BARS[0] for mean in means)


def _number(value: float | None) -> str:
    return "·" if value is None else f"{value:.4g}"


# --- samples -----------------------------------------------------------------------------------------


def _samples(folder: RunFolder, step: int | None, where: str, most: int, *, best: bool, full: bool) -> Iterator[str]:
    condition = read_filter(where)
    if step is not None:
        condition &= Condition("step = ?", (step,))
    if not condition.of_kind:
        condition &= Condition("kind = 'train'")
    if step is None:
        index = open_index(folder)
        _build(index)
    else:
        # The files of one rollout are read at once; the whole run's index would take longer.
        index = RunIndex(folder, None, [file for file in folder.sample_files() if file.step == step])
        index.refresh()
    with closing(index):
        yield from _of_index(index, condition, step, most, best=best, full=full)


def _of_index(
    index: RunIndex, condition: Condition, step: int | None, most: int, *, best: bool, full: bool
) -> Iterator[str]:
    folder = index.folder
    found = queries.find(index, condition, sort="-reward" if best else "reward", limit=most)
    total = queries.count(index, condition)
    yield f"{count(total, 'sample')}{'' if total <= most else f', the {most} ' + ('best' if best else 'worst')}"
    for one in found:
        yield ""
        yield from _sample(one, full=full)
    for problem in index.state().problems:
        yield f"left out: {problem}"
    if step is not None and not index.files():
        steps = [file.step for file in folder.sample_files() if file.kind == "train" and file.step is not None]
        yield (
            f"{folder.path} has samples of rollouts {steps[0]} to {steps[-1]}"
            if steps
            else f"{folder.path} has no samples"
        )


def _build(index: RunIndex) -> None:
    """Bring an index up to date, and say so if that takes long."""
    started, told = time.monotonic(), False

    def slow() -> bool:
        nonlocal told
        if not told and time.monotonic() - started > 2:
            print(f"slime: indexing the samples once, into {index.path}", file=sys.stderr)
            told = True
        return False

    index.refresh(slow)


def _sample(found: queries.Found, *, full: bool) -> Iterator[str]:
    about, read = found.scalars, found.row()
    row = read or {}
    facts = [
        f"reward {_reward(row.get('reward'))}",
        str(about["status"]),
        f"{about['tokens']} tokens",
        *([f"dropped: {about['dropped']}"] if about["dropped"] else []),
    ]
    yield f"{found.key}  step {about['step']}, group {about['grp']}, sample {about['idx']}: {', '.join(facts)}"
    if read is None:
        yield "  the file of this sample was deleted or has changed"
    entries: list[tuple[str, str]] = []
    messages = row.get("messages")
    if isinstance(messages, list):
        roles = (str(one.get("role")) if isinstance(one, dict) else "" for one in messages)
        entries += zip(roles, map(message_text, messages), strict=True)
    else:
        entries += [("prompt", prompt_text(row.get("prompt"))), ("answer", prompt_text(row.get("response")))]
    entries += [(name, str(row[name])) for name in ("label", "failure", "traceback") if row.get(name)]
    for name, text in entries:
        cut = text if full or len(text) <= _TEXT else f"{text[:_TEXT]}… ({len(text):,} characters; --full)"
        lines = cut.split("\n")
        yield from (f"{name if not number else '':>10} │ {line}" for number, line in enumerate(lines))


def _reward(reward: Any) -> str:
    if isinstance(reward, dict):
        return ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                         for name, value in reward.items())  # fmt: skip
    return "none" if reward is None else f"{reward:g}" if isinstance(reward, int | float) else str(reward)
