"""What is asked of an index: tables of samples, groups, the visits of one prompt, prompts of two runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from slime.errors import DataError, did_you_mean
from slime_viewer.alerts import Counts
from slime_viewer.filters import TEXTS_MATCH, Condition
from slime_viewer.index import RunIndex
from slime_viewer.index_tables import INDEX_OF_SORT, OTHER_SORTS, SCALARS
from slime_viewer.lines import line_at
from slime_viewer.run_files import SAMPLES
from slime_viewer.sample_fields import message_text, prompt_text
from slime_viewer.tokens import logged_tokens, summaries, tokens_path

#: what a table can be sorted by
SORTS = ("step", "reward", "tokens", "prompt_tokens", "trained", "turns", "status", "grp", "idx", "version", "gap")
#: characters of a prompt and of a response in a table, and of each text of a sample where several are shown
_EXCERPT, MAX_TEXT = 240, 50_000
#: characters before a word that was searched for, where an excerpt begins there
_BEFORE = 30
#: what ends a model's thinking, in the tags that most templates have
_THOUGHT_ENDS = "</think>"
_WORD = re.compile(r"[^\W_]+")
#: lists within lists of a sample that are shown, and entries of each
_DEPTH, _ENTRIES = 50, 1000
#: samples of one group, or of one prompt
MAX_SAMPLES = 2000
#: samples that are counted for a table: of more, it says so, and they are looked for in the order of the table
COUNTED = 10_000
_GONE = "(the file of this sample was deleted or has changed)"


@dataclass(frozen=True)
class Found:
    """One sample of the index. Its texts are read from its file each time, so that many samples take little memory."""

    #: `000012:3`: file and number of the line; the same as long as the file is
    key: str
    scalars: dict[str, Any]
    path: Path
    offset: int
    length: int

    @property
    def group_key(self) -> str:
        """`000012/40`: file and number of the group."""
        return f"{self.key.rpartition(':')[0]}/{self.scalars['grp']}"

    def row(self) -> dict[str, Any] | None:
        """The line of the file; None if the file is gone."""
        return line_at(self.path, self.offset, self.length)

    @property
    def line(self) -> int:
        """Which line of its file it is, from 0."""
        return int(self.key.rpartition(":")[2])

    def tokens(self) -> dict[str, Any] | None:
        """The columns of its tokens, if the run has logged them. Raises `DataError` if they cannot be read."""
        if self.scalars["kind"] != "train":
            return None
        return logged_tokens(tokens_path(self.path), {self.line: self.scalars["tokens"]}).get(self.line)

    def brief(self, words: Sequence[str] = ()) -> dict[str, Any]:
        """For a table: the scalars, and how prompt and response begin, or what is around `words` in them."""
        return self._brief(self.row(), words)

    def whole(self, max_text: int = MAX_TEXT) -> dict[str, Any]:
        """For reading: everything that was written of it; texts that are longer than `max_text` are cut, and say so."""
        row = self.row()
        return {**self._brief(row), "row": None if row is None else shortened(row, max_text)}

    def _brief(self, row: dict[str, Any] | None, words: Sequence[str] = ()) -> dict[str, Any]:
        texts = {"question": _GONE, "answer": "", "label": ""} if row is None else excerpts(row, words)
        return {"key": self.key, "group_key": self.group_key, **self.scalars, **texts}


def excerpts(row: dict[str, Any], words: Sequence[str] = ()) -> dict[str, str]:
    """How question, answer and label of a sample begin; of a conversation, the last message of the user's.

    An answer begins behind its thinking. A text that has one of `words` further on begins a little before it.
    """
    prompt = row.get("prompt")
    said = [one for one in prompt if isinstance(one, dict)] if isinstance(prompt, list) else []
    asked = next((message_text(one) for one in reversed(said) if one.get("role") != "assistant"), None)
    question = prompt_text(prompt) if asked is None else asked
    texts = {"question": question, "answer": prompt_text(row.get("response")), "label": prompt_text(row.get("label"))}
    looked_for = _looked_for(words)
    thought = texts["answer"].rfind(_THOUGHT_ENDS)
    starts = {"answer": thought + len(_THOUGHT_ENDS)} if thought >= 0 else {}
    return {name: _excerpt(text, starts.get(name, 0), looked_for) for name, text in texts.items()}


def _looked_for(words: Sequence[str]) -> re.Pattern[str] | None:
    """What finds words as the index of words does: in a row, whatever signs and spaces are between them."""
    rows = [r"[\W_]+".join(map(re.escape, found)) for one in words if (found := _WORD.findall(one))]
    return re.compile("|".join(rf"(?<![^\W_]){row}(?![^\W_])" for row in rows), re.IGNORECASE) if rows else None


def _excerpt(text: str, start: int, looked_for: re.Pattern[str] | None) -> str:
    if start and not text[start:].strip():
        start = 0  # it only thinks
    if looked_for and (found := looked_for.search(text)) and not start <= found.start() < start + _EXCERPT - _BEFORE:
        start = max(0, found.start() - _BEFORE)
        if start and (gap := text.find(" ", start, found.start())) >= 0:
            start = gap + 1  # not within a word
    return f"{'… ' if start else ''}{text[start : start + _EXCERPT].lstrip()}"


def shortened(value: Any, most: int, depth: int = _DEPTH) -> Any:
    """A JSON value with its long texts and lists cut, each with how much is left out, and no deeper than `depth`."""
    if isinstance(value, str) and len(value) > most:
        return f"{value[:most]}\n… {len(value) - most:,} more characters are in the file"
    if isinstance(value, list | dict) and not depth:
        return "…"
    if isinstance(value, list):
        cut = [shortened(one, most, depth - 1) for one in value[:_ENTRIES]]
        return [*cut, f"… {len(value) - _ENTRIES:,} more are in the file"] if len(value) > _ENTRIES else cut
    if isinstance(value, dict):
        kept = {shortened(name, most): shortened(one, most, depth - 1) for name, one in islice(value.items(), _ENTRIES)}
        return {**kept, "…": f"… {len(value) - _ENTRIES:,} more are in the file"} if len(value) > _ENTRIES else kept
    return value


_SELECT = f"SELECT files.name, samples.line, offset, length, {', '.join(f'samples.{name}' for name in SCALARS)}"
_FROM = "FROM samples JOIN files ON files.id = samples.file"


def count(index: RunIndex, condition: Condition) -> int:
    """How many samples a filter finds."""
    rows, parameters = source(condition)
    [(number,)] = index.query(f"SELECT count(*) {rows}", parameters)
    return int(number)


def find(
    index: RunIndex, condition: Condition, *, sort: str = "step", limit: int = 100, offset: int = 0
) -> list[Found]:
    """The samples that a filter finds, `limit` of them from the one numbered `offset` on; see `table`."""
    return table(index, condition, sort=sort, limit=limit, offset=offset)[0]


def table(
    index: RunIndex, condition: Condition, *, sort: str = "step", limit: int = 100, offset: int = 0
) -> tuple[list[Found], int]:
    """A part of the samples that a filter finds, and how many there are.

    Args:
        index: The index.
        condition: The filter.
        sort: One of `SORTS`, with a `-` in front: the largest first. Samples without a value come last.
        limit: How many.
        offset: How many to leave out.

    Returns:
        The samples, and the number of all that the filter finds; more than `COUNTED`: there are more than that.

    Raises:
        DataError: They cannot be sorted by that.
    """
    column, down = sorting(sort)
    some = first(index, condition, column)
    if len(some) > COUNTED:
        numbers = _in_order(index, condition, column, down, limit, offset)
    else:
        numbers = ordered(some, down)[offset : offset + limit]
    return numbered(index, numbers), len(some)


def sorting(sort: str) -> tuple[str, bool]:
    """The column of a sort, and whether the largest comes first. Raises `DataError`."""
    column = sort.removeprefix("-")
    if column not in SORTS:
        raise DataError(f"samples cannot be sorted by {column!r}.{did_you_mean(column, SORTS)} {', '.join(SORTS)} can")
    return column, sort.startswith("-")


def ordered(some: Iterable[tuple[int, Any]], down: bool) -> list[int]:
    """Numbers of samples in the order of their values; those without one are last in both directions."""
    keys = sorted(((value is None) != down, 0 if value is None else value, number) for number, value in some)
    return [number for *_, number in (reversed(keys) if down else keys)]


def numbered(index: RunIndex, numbers: Sequence[int]) -> list[Found]:
    """The samples with these numbers, in their order."""
    marks = ", ".join("?" * len(numbers))
    rows = index.query(f"{_SELECT}, samples.id {_FROM} WHERE samples.id IN ({marks})", numbers)
    by_number = {row[-1]: row[:-1] for row in rows}
    return [_found(index.folder.path, by_number[number]) for number in numbers if number in by_number]


def first(index: RunIndex, condition: Condition, column: str) -> list[tuple[int, Any]]:
    """Number and value of a column of the samples that a filter finds: all, or `COUNTED` and one of them."""
    select, most = f"SELECT samples.id, samples.{column}", COUNTED + 1
    if condition.phrase and condition.sql != "1":
        # Words of few samples: these are all. Words of many: most of their samples fit, as is usual, or they do not.
        near = f"(SELECT rowid AS number FROM texts WHERE texts MATCH ? LIMIT {2 * most})"
        joined = f"{select} FROM {near} LEFT JOIN samples ON samples.id = number AND {condition.sql}"
        rows = index.query(joined, (condition.phrase, *condition.parameters))
        found = [row for row in rows if row[0] is not None]
        if len(rows) < 2 * most or len(found) >= most:
            return found[:most]
        fits, parameters = where(condition)
        return index.query(f"{select} FROM samples WHERE {fits} LIMIT {most}", parameters)
    chosen, parameters = source(condition)
    return index.query(f"{select} {chosen} LIMIT {most}", parameters)


def source(condition: Condition) -> tuple[str, tuple[object, ...]]:
    """The rows of a condition, words first, and its parameters."""
    if condition.phrase:
        joined = f"FROM texts CROSS JOIN samples ON samples.id = texts.rowid WHERE texts MATCH ? AND {condition.sql}"
        return joined, (condition.phrase, *condition.parameters)
    return f"FROM samples WHERE {condition.sql}", condition.parameters


def where(condition: Condition) -> tuple[str, tuple[object, ...]]:
    """A condition as one of SQL on `samples`, and its parameters."""
    if not condition.phrase:
        return condition.sql, condition.parameters
    return f"{condition.sql} AND {TEXTS_MATCH}", (*condition.parameters, condition.phrase)


def _in_order(index: RunIndex, condition: Condition, column: str, down: bool, limit: int, offset: int) -> list[int]:
    """The numbers of samples that are looked for in the order of a column, which is quick if many fit."""
    turn = " DESC" if down else ""
    if column == "step" and condition.phrase and index.in_order():
        # The index of words is in the order of the steps.
        rows, parameters = source(condition)
        chosen = f"SELECT samples.id {rows} ORDER BY texts.rowid{turn} LIMIT ? OFFSET ?"
    else:
        fits, parameters = where(condition)
        # Missing values are the smallest for SQLite: downwards they are last. In both downwards, so that an index has
        # this order.
        order = f"samples.{column}{turn or ' ASC NULLS LAST'}, id{turn}"
        # Without statistics SQLite would rather sort a million samples of one kind.
        by = INDEX_OF_SORT.get(column, OTHER_SORTS)
        chosen = f"SELECT id FROM samples INDEXED BY {by} WHERE {fits} ORDER BY {order} LIMIT ? OFFSET ?"
    return [number for (number,) in index.query(chosen, (*parameters, limit, offset))]


def group(index: RunIndex, key: str) -> tuple[list[Found], int]:
    """The samples of a group, `000012/40`, in the order of the file: the first ones, and how many there are."""
    return _some(index, of_group(key), "line")


def token_summaries(found: Sequence[Found]) -> dict[int, dict[str, Any]]:
    """What the columns of tokens of one group's samples come to, by line."""
    if not found or found[0].scalars["kind"] != "train":
        return {}
    return summaries(tokens_path(found[0].path), {one.line for one in found})


def group_tokens(found: Sequence[Found]) -> dict[int, dict[str, Any]]:
    """The columns of the tokens of one group's samples that were logged, by line. Raises `DataError`."""
    if not found or found[0].scalars["kind"] != "train":
        return {}
    return logged_tokens(tokens_path(found[0].path), {one.line: one.scalars["tokens"] for one in found})


def of_group(key: str) -> Condition:
    """The samples of a group, by its key."""
    file, _, number = key.rpartition("/")
    # Samples without a group have "None".
    place = (f"{file}.jsonl", whole_number(number))
    return Condition("samples.file = (SELECT id FROM files WHERE name = ?) AND grp IS ?", place)


def sample(index: RunIndex, key: str) -> Found | None:
    """The sample `000012:3`; None if there is none."""
    file, _, line = key.rpartition(":")
    found = _select(index, "WHERE files.name = ? AND samples.line = ? LIMIT 1", [f"{file}.jsonl", whole_number(line)])
    return found[0] if found else None


#: how tokens are ordered by a value: from the highest, from the lowest, from the largest without its sign
TOKEN_ORDERS = {"high": "value DESC", "low": "value", "size": "abs(value) DESC"}


def token_columns(index: RunIndex) -> list[str]:
    """Columns of tokens that the run has logged."""
    return [name for (name,) in index.query("SELECT DISTINCT column FROM extremes ORDER BY column")]


def token_scales(index: RunIndex) -> dict[str, tuple[float, float]]:
    """Column of tokens -> its lowest and its highest value in the run."""
    rows = index.query("SELECT column, min(value), max(value) FROM extremes GROUP BY column")
    return {name: (low, high) for name, low, high in rows}


def extreme_tokens(
    index: RunIndex, condition: Condition, column: str, order: str, limit: int
) -> list[tuple[Found, int, float, str]]:
    """Samples with the position, value and text of a token of theirs: the most extreme of a column.

    Raises:
        DataError: The order is unknown.
    """
    if order not in TOKEN_ORDERS:
        raise DataError(f"tokens cannot be ordered by {order!r}; expected {', '.join(TOKEN_ORDERS)}")
    fits, parameters = where(condition)
    chosen = "" if fits == "1" else f" AND samples.id IN (SELECT id FROM samples WHERE {fits})"
    rows = index.query(
        f"{_SELECT}, position, value, piece {_FROM} JOIN extremes ON extremes.file = samples.file"
        f" AND extremes.line = samples.line WHERE column = ?{chosen} ORDER BY {TOKEN_ORDERS[order]} LIMIT ?",
        (column, *parameters, limit),
    )
    return [(_found(index.folder.path, row[:-3]), *row[-3:]) for row in rows]


def visits(index: RunIndex, prompt: str) -> tuple[list[Found], int]:
    """The samples of a prompt through the run, without those that are kept twice (`kind` failed), and how many."""
    return _some(index, Condition("prompt = ? AND kind != 'failed'", (prompt,)), "samples.step, files.name, line")


def _some(index: RunIndex, condition: Condition, order: str) -> tuple[list[Found], int]:
    rest = f"WHERE {condition.sql} ORDER BY {order} LIMIT {MAX_SAMPLES}"
    return _select(index, rest, condition.parameters), count(index, condition)


def whole_number(text: str) -> int | None:
    """A number of an address; None if it is none, or larger than any that is in an index."""
    return int(text) if text.isdecimal() and len(text) < 19 else None


def counts(index: RunIndex) -> Counts:
    """What the samples that were trained on show of a run."""
    # Two questions: an index answers each of them at once, but not both together.
    rewards = "SELECT {}(reward) FROM samples INDEXED BY by_kind WHERE kind = 'train'"
    [(best,)], [(lowest,)] = (index.query(rewards.format(end)) for end in ("max", "min"))
    # Told which index: by its own choice, SQLite reads the rows of all samples, which takes many times as long.
    [(labelled, wrong)] = index.query(
        "SELECT coalesce(sum(labelled), 0), count(*) FROM samples INDEXED BY by_label"
        " WHERE labelled IN (0, 1) AND kind = 'train' AND reward < ?",
        [best],
    )
    return Counts(labelled, wrong, best, lowest)


def extreme_groups(index: RunIndex, condition: Condition, most: int) -> tuple[list[str], list[str]]:
    """The groups with the highest and with the lowest mean reward, of those that a filter finds; none is in both."""
    sql = (
        f"SELECT files.name, grp, avg(reward) {_FROM} WHERE {condition.sql} AND reward IS NOT NULL AND grp IS NOT NULL"
        " GROUP BY file, grp ORDER BY avg(reward) DESC, samples.step DESC, line"
    )
    keys = [f"{name.removesuffix('.jsonl')}/{number}" for name, number, _ in index.query(sql, condition.parameters)]
    best = keys[: min(most, (len(keys) + 1) // 2)]
    return best, [key for key in keys[::-1][:most] if key not in best]


def newest_number(index: RunIndex) -> int:
    """The number of the newest sample: it grows with each that is indexed."""
    [(number,)] = index.query("SELECT coalesce(max(id), 0) FROM samples")
    return int(number)


def newest_rollout(index: RunIndex) -> int | None:
    """The newest rollout whose samples are indexed."""
    sql = (
        "SELECT step FROM samples INDEXED BY by_step WHERE step NOT NULL AND kind = 'train' ORDER BY step DESC LIMIT 1"
    )
    found = index.query(sql)
    return int(found[0][0]) if found else None


def telling_groups(index: RunIndex, step: int) -> list[str]:
    """The groups of a rollout, those first whose rewards differ."""
    sql = (
        f"SELECT files.name, grp {_FROM} WHERE samples.step = ? AND kind = 'train' AND grp IS NOT NULL"
        " GROUP BY file, grp ORDER BY max(reward) IS NOT min(reward) DESC, min(line)"
    )
    return [f"{name.removesuffix('.jsonl')}/{number}" for name, number in index.query(sql, [step])]


def prompt_means(index: RunIndex, kind: str) -> dict[str, tuple[float, int, str]]:
    """Prompt -> mean reward over the last visit's samples, how many visits it had, and the key of that group."""
    sql = (
        f"SELECT prompt, avg(reward), files.name, grp, samples.step {_FROM}"
        " WHERE kind = ? AND reward IS NOT NULL GROUP BY prompt, file ORDER BY samples.step"
    )
    means: dict[str, tuple[float, int, str]] = {}
    for prompt, mean, name, number, _ in index.query(sql, [kind]):
        seen = means[prompt][1] if prompt in means else 0
        means[prompt] = (mean, seen + 1, f"{name.removesuffix('.jsonl')}/{number}")
    return means


def _select(index: RunIndex, rest: str, parameters: Iterable[object]) -> list[Found]:
    return [_found(index.folder.path, row) for row in index.query(f"{_SELECT} {_FROM} {rest}", list(parameters))]


def _found(run: Path, row: Sequence[Any]) -> Found:
    name, line, offset, length, *scalars = row
    about = dict(zip(SCALARS, scalars, strict=True))
    return Found(f"{name.removesuffix('.jsonl')}:{line}", about, run / SAMPLES / name, offset, length)
