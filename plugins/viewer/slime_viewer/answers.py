"""What the page asks for, as JSON: the server answers with it, and a static page contains it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from slime.errors import DataError
from slime_viewer import queries, results
from slime_viewer.alerts import Alert, Counts, alerts
from slime_viewer.differences import (
    config_differences,
    flat,
    identical_until,
    metric_ends,
    plugin_differences,
    prompts_compared,
    seed_sets,
    told_apart,
)
from slime_viewer.filters import Condition, read_filter, searched
from slime_viewer.index import IndexState, RunIndex
from slime_viewer.lines import dumped
from slime_viewer.panels import LANES, panels
from slime_viewer.progress import progress
from slime_viewer.queries import Found
from slime_viewer.run_files import Metrics, RunFolder
from slime_viewer.verdict import verdict
from slime_viewer.words import all_words

#: rows of a table that are sent at once, at most, and prompts of two runs
MAX_ROWS, MAX_PROMPTS = 500, 100
#: tokens of a list of the most extreme ones
MAX_TOKENS = 100
#: bytes of samples in an answer, and in a file
MAX_BYTES = 16 * 2**20
#: characters of each text where a sample is shown alone
_WHOLE_TEXT = 2_000_000
#: characters of each text of the first screen
_TOLD_TEXT = 3000


def run_answer(
    folder: RunFolder,
    state: IndexState,
    index: str,
    trouble: str = "",
    counts: Counts | None = None,
    found: Sequence[Alert] | None = None,
    outcome: str | None = None,
) -> dict[str, Any]:
    """A run without its curves.

    Args:
        folder: The run.
        state: How far its index is.
        index: Where the index lies.
        trouble: Why it is not continued.
        counts: What its samples show.
        found: What is worth a look, if it is known already.
        outcome: How the run has just ended, if its own process asks.
    """
    metrics = folder.metrics
    used = folder.plugins().get("used", {})
    known = metrics.names
    gone = progress(folder, outcome)
    judged = verdict(folder, gone, alerts(metrics, counts) if found is None else found)
    return {
        "name": folder.name,
        "path": str(folder.path),
        "state": gone.state,
        "progress": {**asdict(gone), "left_s": gone.left_s, "spent_s": sum(metrics.series("time/step")[1])},
        "verdict": asdict(judged),
        "best": None if counts is None else counts.best,
        "rewards": None if counts is None or counts.best is None else [counts.lowest, counts.best],
        "events": [asdict(event) for event in reversed(folder.events())],
        "problems": [*folder.problems(), *state.problems, *([trouble] if trouble else [])],
        "panels": [asdict(panel) for panel in panels(metrics)],
        "lanes": [asdict(lane) for lane in LANES if lane.metric in known],
        "names": known,
        "words": all_words(known),
        "config": _entries(folder.config()),
        "plugins": _entries(used if isinstance(used, dict) else {}),
        "command": folder.command(),
        "index": {"path": index, "samples": state.samples, "done": state.done, "total": state.total},
    }


def _entries(content: dict[str, Any]) -> list[tuple[str, str]]:
    known = ((name, value) for name, value in flat(content).items() if value not in (None, {}))
    return [(name, value if isinstance(value, str) else json.dumps(value, default=str)) for name, value in known]


def series_answer(metrics: Metrics, names: Sequence[str]) -> dict[str, Any]:
    """Curves on common steps; null where a metric has no value. With other axes: see `_axes`."""
    known = set(metrics.names)
    wanted = [name for name in names if name in known]
    steps = [step for step in metrics.steps if any(metrics.rows[step].get(name) is not None for name in wanted)]
    values = {name: [metrics.rows[step].get(name) for step in steps] for name in wanted}
    return {"steps": steps, "values": values, "axes": _axes(metrics, steps)}


def _axes(metrics: Metrics, steps: Sequence[int]) -> dict[str, list[float]]:
    """What steps may be counted in instead: samples and tokens up to each one, and seconds since the first one."""
    tokens = "rollout/tokens" if "rollout/tokens" in metrics.names else "train/tokens"
    sums = {"samples": "rollout/samples", "tokens": tokens}
    axes: dict[str, list[float]] = {}
    for axis, name in sums.items():
        up_to, total = {}, 0.0
        for step in metrics.steps:
            up_to[step] = total = total + (metrics.rows[step].get(name) or 0.0)
        if total:
            axes[axis] = [up_to[step] for step in steps]
    if metrics.times:
        first = last = min(metrics.times.values())
        axes["time"] = []
        for step in steps:
            # Of a run that was resumed, a step may have been written before the one in front of it.
            last = max(last, metrics.times.get(step, last))
            axes["time"].append(last - first)
    return axes


def says_answer(index: RunIndex, step: int | None, number: int) -> dict[str, Any]:
    """What the model says: a prompt of a rollout with its best and its worst answer.

    Args:
        index: The run.
        step: The rollout; None: the newest.
        number: Which of its prompts; those whose answers differ in their reward come first.
    """
    newest = queries.newest_rollout(index)
    told: dict[str, Any] = {"newest": newest, "step": newest if step is None else step, "groups": 0}
    keys = [] if told["step"] is None else queries.telling_groups(index, told["step"])
    if not keys:
        return told
    key = keys[number % len(keys)]
    found, total = queries.group(index, key)
    by_reward = sorted(found, key=lambda one: (one.scalars["reward"] is not None, one.scalars["reward"] or 0.0))
    worst, best = by_reward[0], by_reward[-1]
    rewards = [one.scalars["reward"] for one in found if one.scalars["reward"] is not None]
    return {
        **told,
        "groups": len(keys),
        "key": key,
        "rewards": rewards,
        "size": total,
        "best": best.whole(_TOLD_TEXT),
        "worst": None if worst is best else worst.whole(_TOLD_TEXT),
    }


def samples_answer(index: RunIndex, line: str, sort: str, offset: int, limit: int) -> dict[str, Any]:
    """A part of the table of samples that a filter line finds."""
    condition, most = read_filter(line), queries.COUNTED
    found, total = queries.table(index, condition, sort=sort, limit=min(limit, MAX_ROWS), offset=offset)
    # Of very many, means would take seconds.
    means = results.means(index, condition) if limit and total <= most else None
    told = {"q": line, "total": min(total, most), "more": total > most, "indexed": queries.newest_number(index)}
    hits = searched(line)
    rows = [one.brief(hits) for one in found]
    return {**told, "means": means, "hits": hits, "groups": results.groups_of(index, found), "rows": rows}


def beside_answer(index: RunIndex, condition: Condition, sort: str, key: str, back: bool) -> dict[str, Any]:
    """The sample next to another one in what a filter finds; null at an end."""
    found = results.beside(index, condition, sort, key, back=back)
    return {"beside": found and {"key": found.key, "group_key": found.group_key}}


def group_answer(index: RunIndex, key: str, line: str = "") -> dict[str, Any]:
    """The samples of one group, and how many were left out. Raises `DataError` if there is none.

    Args:
        index: The run.
        key: The group.
        line: The filter line whose words are to be marked.
    """
    found, total = queries.group(index, key)
    answer = _some(found, total, f"group {key}")
    logged = queries.token_summaries(found)
    tokens = {one.key: logged[one.line] for one in found if one.line in logged}
    return {**answer, "tokens": tokens, "hits": searched(line)}


def group_tokens_answer(index: RunIndex, key: str, column: str) -> dict[str, Any]:
    """One column of the tokens of a group's samples, as far as they were logged and there is room, and its scale.

    Raises `DataError`.
    """
    found, _ = queries.group(index, key)
    told = queries.group_tokens(found)
    own = sorted({name for one in told.values() for name in one["own"]})
    columns = list(dict.fromkeys(name for one in told.values() for name in one["values"]))
    tokens: dict[str, Any] = {}
    room = MAX_BYTES
    for one in found if column else ():
        if (logged := told.get(one.line)) is not None and column in logged["values"]:
            kept = {name: logged["values"][name] for name in {column, "loss_mask"} & logged["values"].keys()}
            tokens[one.key] = {"pieces": logged["pieces"], "values": kept}
            room -= len(dumped(tokens[one.key]))
            if room < 0:
                break
    scales = queries.token_scales(index)
    return {"column": column, "columns": columns, "own": own, "tokens": tokens, "scales": scales}


def sample_answer(index: RunIndex, key: str, line: str = "") -> dict[str, Any]:
    """One sample, whole; `line`: as of `group_answer`. Raises `DataError` if there is none."""
    found = queries.sample(index, key)
    if found is None:
        raise _missing(f"sample {key}")
    return {"sample": found.whole(_WHOLE_TEXT), "hits": searched(line)}


def tokens_answer(index: RunIndex, key: str) -> dict[str, Any]:
    """The columns of tokens of one sample, null if they were not logged, and the run's scales. Raises `DataError`."""
    found = queries.sample(index, key)
    if found is None:
        raise _missing(f"sample {key}")
    tokens = found.tokens()
    return {"tokens": None} if tokens is None else {"tokens": tokens, "scales": queries.token_scales(index)}


def extremes_answer(index: RunIndex, line: str, column: str, order: str) -> dict[str, Any]:
    """The tokens of a run with the most extreme values of a column, of the samples that a filter line finds."""
    columns = queries.token_columns(index)
    column = column or next((name for name in ("gap", *columns) if name in columns), "")
    found = queries.extreme_tokens(index, read_filter(line), column, order, MAX_TOKENS)
    rows = [{**one.brief(), "at": at, "value": value, "piece": piece} for one, at, value, piece in found]
    return {"columns": columns, "column": column, "rows": rows}


def prompt_answer(index: RunIndex, prompt: str) -> dict[str, Any]:
    """All samples of one prompt through the run, but for those left out. Raises `DataError` if there is none."""
    return _some(*queries.visits(index, prompt), f"prompt {prompt}")


def whole_samples(found: Sequence[Found], max_text: int) -> list[dict[str, Any]]:
    """Samples for reading: the first one, and the next ones that `MAX_BYTES` have room for."""
    told: list[dict[str, Any]] = []
    room = MAX_BYTES
    for one in found:
        whole = one.whole(max_text)
        room -= len(dumped(whole))
        if told and room < 0:
            break
        told.append(whole)
    return told


def _some(found: list[Found], total: int, what: str) -> dict[str, Any]:
    if not found:
        raise _missing(what)
    told = whole_samples(found, queries.MAX_TEXT)
    return {"samples": told, "left_out": total - len(told)}


def _missing(what: str) -> DataError:
    return DataError(f"there is no {what} in this run; its file may have been deleted, or not be indexed yet")


def compare_answer(runs: Sequence[RunIndex], kind: str) -> dict[str, Any]:
    """What differs between runs, and the prompts whose rewards of the samples of a `kind` differ most."""
    folders = [run.folder for run in runs]
    prompts = prompts_compared(runs, kind, MAX_PROMPTS)
    for entry in prompts:
        members, _ = queries.group(runs[0], entry["runs"][0]["group"])
        entry["question"] = members[0].brief()["question"] if members else ""
    config, plugins = config_differences(*folders), plugin_differences(*folders)
    names = [folder.name for folder in folders]
    return {
        "labels": told_apart(config, names),
        "sets": seed_sets(config, plugins, names),
        "config": [asdict(one) for one in config],
        "plugins": [asdict(one) for one in plugins],
        "ends": [{**asdict(one), "clear": one.clear} for one in metric_ends(*(folder.metrics for folder in folders))],
        "identical": [identical_until(folders[0].metrics, folder.metrics) for folder in folders[1:]],
        "prompts": prompts,
    }
