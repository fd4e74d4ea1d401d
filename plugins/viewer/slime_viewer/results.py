"""What a filter finds, as a whole: means, rewards over the steps, groups, and what is next to a sample."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slime_viewer import queries
from slime_viewer.filters import Condition
from slime_viewer.index import RunIndex
from slime_viewer.queries import Found

#: columns of a histogram, rows if rewards have many values, and from how many pairs of step and reward on SQLite places
#: them
_COLUMNS, _ROWS, _VALUES = 60, 8, 20_000
#: samples that a histogram counts of what words find: of more, one of every so many; and how many hits of the words are
#: read for that, at most, where few of them fit the rest of the filter
_COUNTED, _READ = 50_000, 500_000
#: one of every so many samples, by a hash of its number: the same places of all groups would not be like the others
_ONE_OF = " AND (texts.rowid * 2654435761 & 4294967295) / 65536 % {} = 0"
#: how many rewards of a group are listed; its mean and its passes count all
_LISTED = 64


def means(index: RunIndex, condition: Condition) -> dict[str, float | None]:
    """Of the samples that a filter finds: mean reward and tokens, and the share that was cut off."""
    rows, parameters = queries.source(condition)
    chosen = f"SELECT avg(reward), avg(tokens), avg(status IS 'truncated') {rows}"
    [(reward, tokens, cut)] = index.query(chosen, parameters)
    return {"reward": reward, "tokens": tokens, "cut": cut}


def histogram(index: RunIndex, condition: Condition) -> dict[str, Any]:
    """How the rewards of the samples that a filter finds are spread, over the steps.

    Returns:
        `steps`: first and last step of each column. `levels`: lowest and highest reward of each row, the lowest row
        first; each reward has a row of its own if there are few. `counts`: by column and row. `every`: of how many
        samples one is counted: 1, or more if words find so many that counting all would take seconds. Without rewards
        all else is empty.
    """
    every = 1
    rows, parameters = queries.source(condition & Condition("reward NOT NULL AND step NOT NULL"))
    if len(queries.first(index, condition, "step")) > queries.COUNTED:
        if condition.phrase:
            [(hits,)] = index.query("SELECT count(*) FROM texts WHERE texts MATCH ?", [condition.phrase])
            every = -(-hits // _COUNTED)
            [(fit,)] = index.query(f"SELECT count(*) {rows}{_ONE_OF.format(every)}", parameters)
            every = max(1, -(-hits // _READ), -(-every * fit // _COUNTED))
            rows += _ONE_OF.format(every)
        else:
            # By its own choice, SQLite would read the rows of all samples.
            rows = rows.replace("FROM samples", "FROM samples INDEXED BY by_kind", 1)
    by_value = f"SELECT step, reward, count(*) {rows} GROUP BY reward, step LIMIT {_VALUES}"
    found = index.query(by_value, parameters)
    if not found:
        return {"steps": [], "levels": [], "counts": [], "every": every}
    if len(found) < _VALUES:
        first, last = min(step for step, *_ in found), max(step for step, *_ in found)
        low, high = min(reward for _, reward, _ in found), max(reward for _, reward, _ in found)
    else:
        ends = f"SELECT min(step), max(step), min(reward), max(reward) {rows}"
        [(first, last, low, high)] = index.query(ends, parameters)
    wide, size = -(-(last - first + 1) // _COLUMNS), (high - low) / _ROWS
    levels = sorted({reward for _, reward, _ in found})
    few = len(found) < _VALUES and len(levels) <= _ROWS

    def row(reward: float) -> int:
        return levels.index(reward) if few else min(int((reward - low) / size), _ROWS - 1)

    if len(found) < _VALUES:
        placed = [((step - first) // wide, row(reward), number) for step, reward, number in found]
    else:
        by_level = (
            f"SELECT (step - ?) / ? AS place, min(cast((reward - ?) / ? AS INT), ?) AS level, count(*) {rows}"
            " GROUP BY place, level"
        )
        placed = index.query(by_level, (first, wide, low, size, _ROWS - 1, *parameters))
    ranges = [(low + n * size, low + (n + 1) * size) for n in range(_ROWS)]
    counts = [[0] * (len(levels) if few else _ROWS) for _ in range((last - first) // wide + 1)]
    for place, level, number in placed:
        counts[place][level] += number
    return {
        "steps": [(first + n * wide, min(last, first + (n + 1) * wide - 1)) for n in range(len(counts))],
        "levels": [(level, level) for level in levels] if few else ranges,
        "counts": counts,
        "every": every,
    }


def groups_of(index: RunIndex, found: Iterable[Found]) -> dict[str, dict[str, Any]]:
    """Of the groups of some samples: how many samples they have, their rewards, and how many are the run's highest."""
    [(best,)] = index.query("SELECT max(reward) FROM samples INDEXED BY by_kind WHERE kind = 'train'")
    told: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys(one.group_key for one in found):
        condition = queries.of_group(key)
        sums = f"SELECT count(*), count(reward), avg(reward), sum(reward >= ?) FROM samples WHERE {condition.sql}"
        [(size, scored, mean, passed)] = index.query(sums, (best, *condition.parameters))
        some = f"SELECT reward FROM samples WHERE {condition.sql} ORDER BY line LIMIT {_LISTED}"
        rewards = [reward for (reward,) in index.query(some, condition.parameters)]
        told[key] = {"size": size, "scored": scored, "mean": mean, "passed": passed, "rewards": rewards}
    return told


def beside(index: RunIndex, condition: Condition, sort: str, key: str, *, back: bool) -> Found | None:
    """The sample that follows another one in what a filter finds, or precedes it; None at an end.

    The other one need not be found by the filter itself. Raises `DataError` if samples cannot be sorted so.
    """
    column, down = queries.sorting(sort)
    if (here := _number_and_value(index, key, column)) is None:
        return None
    number, value = here
    some = queries.first(index, condition, column)
    if len(some) <= queries.COUNTED:
        order = queries.ordered({*some, here}, down)
        at = order.index(number) + (-1 if back else 1)
        following = order[at : at + 1] if at >= 0 else []
    else:
        following = []
        for more, values in _parts(column, number, value, up=down == back, back=back):
            turn = "ASC" if down == back else "DESC"
            order_by = f"ORDER BY samples.{column} {turn}, samples.id {turn} LIMIT 1"
            fits, parameters = queries.where(condition)
            rows = index.query(f"SELECT id FROM samples WHERE {fits} AND {more} {order_by}", (*parameters, *values))
            if following := [found for (found,) in rows]:
                break
    return next(iter(queries.numbered(index, following)), None)


def place(index: RunIndex, condition: Condition, sort: str, key: str) -> int | None:
    """How many samples precede one in what a filter finds; None if it is not found itself. Raises `DataError`."""
    column, down = queries.sorting(sort)
    if (here := _number_and_value(index, key, column)) is None:
        return None
    some = queries.first(index, condition, column)
    if len(some) <= queries.COUNTED:
        return queries.ordered(some, down).index(here[0]) if here in some else None
    if not queries.count(index, condition & Condition("samples.id = ?", (here[0],))):
        return None
    before = _parts(column, *here, up=down, back=True)
    return sum(queries.count(index, condition & Condition(more, values)) for more, values in before)


def _number_and_value(index: RunIndex, key: str, column: str) -> tuple[int, Any] | None:
    file, _, line = key.rpartition(":")
    here = f"SELECT samples.id, {column} FROM samples WHERE file = (SELECT id FROM files WHERE name = ?) AND line = ?"
    found = index.query(here, (f"{file}.jsonl", queries.whole_number(line)))
    return (found[0][0], found[0][1]) if found else None


def _parts(column: str, number: int, value: Any, *, up: bool, back: bool) -> list[tuple[str, tuple[Any, ...]]]:
    """Conditions of what is on one side of a sample, the nearest part first; samples without a value come last."""
    sign, missing = ">" if up else "<", f"samples.{column} IS NULL"
    if value is None:
        rest = [(f"samples.{column} NOT NULL", ())] if back else []
        return [(f"{missing} AND samples.id {sign} ?", (number,)), *rest]
    rest = [] if back else [(missing, ())]
    return [(f"(samples.{column}, samples.id) {sign} (?, ?)", (value, number)), *rest]
