"""The verdict on a run, the same in the page, in `report.html` and in `slime show`: is it well, and how is that known?

Silence is no health: a run that ended early, or of which too little is known, is never called healthy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from slime_viewer.alerts import CHECKS, MIN_STEPS, Alert
from slime_viewer.progress import RunProgress
from slime_viewer.run_files import LOCK, METRICS, Metrics, RunFolder

HEALTHY, LOOK, UNKNOWN, UNFINISHED = "healthy", "look", "unknown", "unfinished"
#: from which share of lost rows on nothing is said of the rest
LOST = 0.1
_GOES_ON = ("running", "elsewhere")


@dataclass(frozen=True)
class Verdict:
    """What is known of a run's health."""

    #: "unfinished", "look" (worth a look), "unknown" (cannot judge) or "healthy": the first of these that is so
    state: str
    #: the state in words
    title: str
    #: how it is known, or why it is not
    reasons: tuple[str, ...]
    #: what is worth a look, the worst first; also of a run that did not finish
    alerts: tuple[Alert, ...]
    #: what to type to go on with a run that did not finish, and what that does
    command: str = ""
    command_note: str = ""


def verdict(folder: RunFolder, gone: RunProgress, alerts: Sequence[Alert]) -> Verdict:
    """Judge a run.

    Args:
        folder: The run, whose metrics have been read.
        gone: How far it is.
        alerts: What was found in its metrics and samples.
    """
    silent = [_silence(gone)] if gone.state == "silent" else []
    found = (*alerts[: (first := sum(one.urgent for one in alerts))], *silent, *alerts[first:])
    doubts = _doubts(folder, gone)
    if gone.ended_early:
        since = f" on {time.strftime('%Y-%m-%d at %H:%M', time.localtime(gone.last_write))}" if gone.last_write else ""
        ended = {"interrupted": "It was interrupted", "failed": "It failed", "killed": "It ended"}[gone.state]
        reasons = (f"{ended}{since}, {gone.cause}." if gone.cause else f"{ended}{since}.", *doubts)
        title = f"Did not finish: {gone.steps}"
        return Verdict(UNFINISHED, title, reasons, found, gone.resume, gone.resume_note)
    if found:
        rest = ["Nothing else can be judged.", *doubts] if doubts else []
        return Verdict(LOOK, f"Worth a look: {len(found)}", tuple(rest), found)
    if doubts:
        return Verdict(UNKNOWN, f"Cannot judge{' yet' if gone.state in _GOES_ON else ''}", tuple(doubts), ())
    return Verdict(HEALTHY, f"Healthy{' so far' if gone.state in _GOES_ON else ''}", (_passed(folder.metrics),), ())


def _silence(gone: RunProgress) -> Alert:
    since = time.strftime("%Y-%m-%d at %H:%M", time.localtime(gone.last_write))
    a_step = f"; a step took {duration(gone.step_s)}" if gone.step_s is not None else ""
    return Alert(
        f"nothing was written since {since}{a_step}, and the run is not finished ({gone.steps}): {gone.cause}",
        "Look at logs/ in its folder for what it waits for. If its process is gone, go on with:"
        f" {gone.resume or 'slime train --resume'}",
        "time/step",
    )


def _doubts(folder: RunFolder, gone: RunProgress) -> list[str]:
    """Why the metrics do not say how the run is."""
    metrics, found = folder.metrics, []
    if metrics.trouble:
        found.append(f"{METRICS} cannot be read: {metrics.trouble}.")
    elif not metrics.path.exists():
        found.append(f"{METRICS} is missing, so nothing is known of its steps.")
    rows = metrics.read + metrics.broken
    if metrics.broken > LOST * rows:
        found.append(f"{metrics.broken} of {rows} rows of {METRICS} are damaged, so what happened in them is unknown.")
    trained = metrics.trained
    if trained and (gaps := trained[-1] - trained[0] + 1 - len(trained)) > LOST * (trained[-1] - trained[0] + 1):
        found.append(f"{gaps} of {trained[-1] - trained[0] + 1} steps up to step {trained[-1]} are not in {METRICS}.")
    if found:
        return found
    if not trained:
        return [f"No step {'was trained' if gone.state == 'finished' else 'is finished'}: there is nothing to judge."]
    name = "rollout/reward_mean" if "rollout/reward_mean" in metrics.names else "train/loss"
    values = metrics.series(name)[1]
    if len(values) < MIN_STEPS:
        few = f"{len(values)} step{'' if len(values) == 1 else 's'} with {_word(name)}; {MIN_STEPS} are needed."
        so_far = f" So far it is {values[0]:.3g} in each." if len(set(values)) == 1 else ""
        return [f"Too few steps: {few}{so_far}" if values else f"No step has {_word(name)}, which the verdict needs."]
    if gone.total is not None and gone.state == "finished" and len(trained) < (1 - LOST) * gone.total:
        return [f"{LOCK} says that the run is finished, but {METRICS} has only {gone.steps}."]
    if gone.state == "unknown" and (gone.total is None or len(trained) < gone.total):
        return [
            f"{LOCK} is missing or damaged, so it is not known whether the run goes on or has ended ({gone.steps})."
        ]
    return []


def _word(name: str) -> str:
    return "a reward" if name == "rollout/reward_mean" else "a loss"


def _passed(metrics: Metrics) -> str:
    """Which checks had something to look at, and over which steps."""
    known = metrics.names
    # The loss is judged of runs without a reward only.
    checks = [check for check in CHECKS if check.name != ("loss" if "rollout/reward_mean" in known else "reward")]
    has = {check.name: any(name.startswith(check.metrics) for name in known) for check in checks}
    trained = metrics.trained
    seen, unseen = [name for name, any_ in has.items() if any_], [name for name, any_ in has.items() if not any_]
    rest = f" Not logged, so not checked: {', '.join(unseen)}." if unseen else ""
    return f"Checked over steps {trained[0]} to {trained[-1]}: {', '.join(seen)}.{rest}"


def duration(seconds: float | None) -> str:
    """ "0.8 s", "45 s", "12 min", "3 h 20 min"."""
    if seconds is None:
        return "·"
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
