"""`slime show`: a run in the terminal: as a whole, one metric of it, or its worst and best samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from slime.cli.arguments import Arguments
from slime.cli.output import Line, progress, put, write
from slime.cli.text_layout import count, terminal_width
from slime.errors import ConfigError, did_you_mean
from slime_viewer import queries
from slime_viewer.curves import Change, sparkline
from slime_viewer.filters import EXAMPLE, Condition, read_filter
from slime_viewer.index import RunIndex, open_index
from slime_viewer.overview import overview
from slime_viewer.panels import panels
from slime_viewer.run_files import RunFolder
from slime_viewer.sample_fields import message_text, prompt_text
from slime_viewer.words import words

_HELP = f"""\
usage: slime show RUN                   how it goes, what went wrong, its curves
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
_TEXT = 1200


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code. Raises `ConfigError`."""
    if not argv or {"-h", "--help"} & set(argv):
        write(_HELP)
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
    lines: Iterator[Line]
    if samples:
        most, best = (
            (3 if stated.worst is None else stated.worst, False) if stated.best is None else (stated.best, True)
        )
        lines = _samples(folder, stated.step, stated.where, most, best=best, full=stated.full)
    else:
        folder.metrics.refresh()
        lines = _metric(folder, stated.metric) if stated.metric else overview(folder)
    put(lines)
    return 0


def _with_filter(argv: Sequence[str]) -> list[str]:
    """The words with `--where FILTER` as one: a filter may begin with a `-`, which would be taken for an option."""
    words = list(argv)
    for number, word in enumerate(words[:-1]):
        if word == "--where" and words[number + 1].startswith("-") and not words[number + 1].startswith("--"):
            words[number : number + 2] = [f"--where={words[number + 1]}"]
            break
    return words


# --- one metric --------------------------------------------------------------------------------------


def _metric(folder: RunFolder, asked: str) -> Iterator[Line]:
    name = _metric_called(folder, asked)
    steps, values = folder.metrics.series(name)
    if not values:
        yield f"{name}  no finite value"
        return
    called = words(name)
    change = Change.of(values)
    yield [(name, "bold"), f"  {change.text(called)}"]
    yield [(sparkline(values, min(terminal_width() - 2, 100), share=called.unit == "%"), "cyan")]
    for step, value in zip(steps, values, strict=True):
        yield f"{step:>8}  {value * called.factor:.4g}"


def _metric_called(folder: RunFolder, asked: str) -> str:
    """The metric of this name, or of the words that the overview has for it. Raises `ConfigError`."""
    known = folder.metrics.names
    if asked in known:
        return asked
    # Those that are shown come first: `rollout/reward_mean`, and not the seconds that rewards took.
    shown = [name for panel in panels(folder.metrics) for name in panel.metrics]
    titles = {words(name).title: name for name in reversed(shown)}
    if asked in titles:
        return titles[asked]
    for names in (shown, known):
        called = {one: name for name in reversed(names) for one in (name.rpartition("/")[2], words(name).title)}
        if near := did_you_mean(asked, called):
            near = f" Did you mean {called[near.removeprefix(' Did you mean ').removesuffix('?')]}?"
            break
    else:
        near = did_you_mean(asked, known) or f" It has: {', '.join(known) or 'none'}"
    raise ConfigError(f"{folder.path} has no metric {asked!r}.{near}")


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
    """Bring an index up to date, and say how far that is if it takes long."""
    told = time.monotonic()
    with progress("indexing the samples once:", "megabyte") as tell:

        def goes_on() -> bool:
            nonlocal told
            # The state is asked for rarely: it looks at every file.
            if time.monotonic() - told > 0.5:
                told, state = time.monotonic(), index.state()
                tell(state.done // 10**6, max(1, state.total // 10**6))
            return False

        index.refresh(goes_on)


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
