"""Per-token columns of a rollout as a Parquet file: a row for each logged sample, a list for each column.

`docs/columns.md` describes the file. It is made after the rollout was trained on, in the rollout process, which has the
samples and the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from slime.observe.logged_tokens import FIXED_BYTES, LoggedTokens
from slime.observe.samples import FOLDER, whole
from slime.plugin.columns import BUILT_IN, SOURCES
from slime.types import Group, Sample

FORMAT = 1
#: about how many bytes are read to show one sample
_ROW_GROUP_BYTES = 4 * 2**20
#: columns with one entry a row, or of tokens themselves
_OF_ROWS = ("line", "group", "index", "step", "flag", "gap_max", "gap_token", "tokens", "pieces")
#: the element types of columns that are not float32
_WHOLE = {"loss_mask": (np.int8, 0), "source": (np.int8, -1), "weight_version": (np.int32, -1)}


def token_file(run_dir: Path, rollout: int) -> Path:
    """The file of a rollout: `RUN_DIR/rollouts/000012.tokens.parquet`."""
    return run_dir / FOLDER / f"{rollout:06d}.tokens.parquet"


#: the text of a token
Pieces: TypeAlias = Callable[[int], str]


def pieces_of(tokenizer: Any) -> Pieces:
    """The texts of single tokens, each decoded once, with U+FFFD where a token is a part of a character only."""

    @cache
    def piece(token: int) -> str:
        text = str(tokenizer.decode([token]))
        # Some tokenizers drop the space that a word begins with when the word is alone.
        raw = tokenizer.convert_ids_to_tokens(token)
        spaced = isinstance(raw, str) and raw.startswith("\u2581") and not text.startswith(" ")
        return f" {text}" if spaced else text

    return piece


@dataclass(frozen=True)
class _Row:
    line: int
    sample: Sample
    flag: str
    #: None: it was lost before it could be trained on
    step: int | None = None


def write_token_columns(
    run_dir: Path,
    rollout: int,
    groups: Sequence[Group],
    logged: LoggedTokens,
    pieces: Pieces,
    *,
    most_bytes: int | None = None,
) -> Path:
    """Write the columns of one rollout; the file is complete or absent.

    Samples that were lost before they could be trained on come first, with what their generator knew of their tokens.

    Args:
        run_dir: The run folder.
        rollout: The rollout's number.
        groups: All its groups, as in its JSONL file.
        logged: What the trainer computed.
        pieces: Texts of tokens.
        most_bytes: What the columns may take, uncompressed; of lost samples at most half of it. None: any number.

    Raises:
        OSError: The file cannot be written.
    """
    lines = list(enumerate(sample for group in groups for sample in group.samples))
    lost = [
        _Row(line, sample, "failed")
        for line, sample in lines
        if not sample.trainable and 0 < sample.response_length <= len(sample.tokens)
    ]
    trainable = [(line, sample) for line, sample in lines if sample.trainable]
    rows = [
        _Row(*trainable[position], flag, step)
        for position, flag, step in zip(logged.samples, logged.flags, logged.steps, strict=True)
    ]
    named = {name for _, sample in lines for name in sample.columns if name not in BUILT_IN}
    a_token = 4 * (len(logged.columns) + len(named)) + FIXED_BYTES
    rows = [*_within(lost, a_token, None if most_bytes is None else most_bytes // 2), *rows]
    rows = list(_within(rows, a_token, most_bytes))
    table = _Tokens(rows).table(logged, pieces)
    described = {
        "format": FORMAT,
        "rollout": rollout,
        "samples": len(lines),
        "logged": len(rows),
        "columns": table.column_names[len(_OF_ROWS) :],
        "own": [name for name in table.column_names[len(_OF_ROWS) :] if name not in BUILT_IN],
    }
    table = table.replace_schema_metadata({"slime": json.dumps(described)})
    path = token_file(run_dir, rollout)
    a_row = max(1, table.nbytes // max(1, len(rows)))
    with whole(path) as partial:
        pq.write_table(table, partial, compression="zstd", row_group_size=max(1, _ROW_GROUP_BYTES // a_row))
    return path


def _within(rows: Sequence[_Row], bytes_per_token: int, most_bytes: int | None) -> Iterator[_Row]:
    """The first rows that fit."""
    left = most_bytes
    for row in rows:
        if left is not None:
            left -= row.sample.response_length * bytes_per_token
            if left < 0:
                return
        yield row


class _Tokens:
    """All response tokens of R rows, one after the other: S in all. Whole vectors, for rows are many and short."""

    def __init__(self, rows: Sequence[_Row]) -> None:
        self._rows = rows
        self._samples = [row.sample for row in rows]
        self._lengths = np.array([sample.response_length for sample in self._samples], dtype=np.int64)
        self._ends = np.cumsum(self._lengths, dtype=np.int64)
        #: [S] the row of each token
        self._row = np.repeat(np.arange(len(rows)), self._lengths)
        #: name -> [S] numbers, and [R] whether the row does not have the column
        self._columns: dict[str, tuple[NDArray[np.float32], NDArray[np.bool_]]] = {}

    def table(self, logged: LoggedTokens, pieces: Pieces) -> pa.Table:
        """The file's columns: those of rows, slime's own, and the plugins'."""
        self._add_known()
        self._add_computed(logged)
        known = [name for name in BUILT_IN if name in self._columns]
        own = [name for name in self._columns if name not in BUILT_IN]
        arrays = self._of_rows(pieces) | {name: self._list(name) for name in (*known, *own)}
        return pa.table({name: arrays[name] for name in (*_OF_ROWS, *known, *own)})

    def _add(self, name: str, numbers: NDArray[Any], absent: NDArray[np.bool_] | None = None) -> None:
        absent = np.zeros(len(self._rows), dtype=bool) if absent is None else absent
        if not absent.all():
            self._columns[name] = numbers.astype(np.float32, copy=False), absent

    def _each(self, values: Sequence[Any | None], missing: float) -> NDArray[np.float32]:
        """[S] from one list for each row; None, and what has another length than the row: `missing`."""
        fitting = (
            one if one is not None and len(one) == length else repeat(missing, length)
            for one, length in zip(values, self._lengths.tolist(), strict=True)
        )
        return np.fromiter(chain.from_iterable(fitting), np.float32, len(self._row))

    def _of_samples(self, name: str) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """A column of generators or rewards, and which rows do not have it; bit for bit."""
        numbers, absent = np.full(len(self._row), np.nan, dtype=np.float32), np.ones(len(self._rows), dtype=bool)
        for index, sample in enumerate(self._samples):
            column = sample.columns.get(name)
            if column is not None and len(column) == sample.response_length:
                end = self._ends[index]
                numbers[end - len(column) : end] = column
                absent[index] = False
        return numbers, absent

    def _add_known(self) -> None:
        """What generator and rewards know."""
        samples, of = self._samples, self._row
        ones = np.array([sample.loss_mask is None for sample in samples], dtype=bool)
        mask = np.where(ones[of], 1.0, self._each([sample.loss_mask for sample in samples], 0.0))
        kept = np.array([not sample.remove_sample for sample in samples], dtype=bool)
        self._add("loss_mask", mask * kept[of])
        trained = np.bincount(of, weights=mask, minlength=len(samples))
        source, unknown = self._of_samples("source")
        # A response of which everything is trained on is all the policy's.
        policy = (mask > 0) | (trained == self._lengths)[of]
        source = np.where(unknown[of], np.where(policy, SOURCES["policy"], np.nan), source)
        self._add("source", source)
        sampled = source == SOURCES["policy"]
        versions, unknown = self._of_samples("weight_version")
        single = np.array([_only_version(sample) for sample in samples], dtype=np.float32)
        versions = np.where(unknown[of], np.where(sampled, single[of], np.nan), versions)
        self._add("weight_version", versions, unknown & np.isnan(single))
        log_probs = [sample.rollout_log_probs for sample in samples]
        engine = self._each(log_probs, np.nan)
        absent = [
            one is None or len(one) != sample.response_length for one, sample in zip(log_probs, samples, strict=True)
        ]
        # 0 stands for tokens that no engine sampled.
        self._add("engine_logprob", np.where(sampled | (engine != 0), engine, np.nan), np.array(absent, dtype=bool))
        for name in dict.fromkeys(name for sample in samples for name in sample.columns):
            if name not in BUILT_IN:
                self._add(name, *self._of_samples(name))

    def _add_computed(self, logged: LoggedTokens) -> None:
        """What the trainer computed, and the gap."""
        lost = np.array([row.step is None for row in self._rows], dtype=bool)
        trained = ~lost[self._row]
        for name, values in logged.columns.items():
            numbers = np.full(len(self._row), np.nan, dtype=np.float32)
            numbers[trained] = values[: np.count_nonzero(trained)]
            self._add(name, numbers, lost)
        if {"trainer_logprob", "engine_logprob"} <= self._columns.keys():
            (trainer, _), (engine, unknown) = (self._columns[name] for name in ("trainer_logprob", "engine_logprob"))
            self._add("gap", trainer - engine, lost | unknown)

    def _of_rows(self, pieces: Pieces) -> dict[str, pa.Array]:
        rows, samples = self._rows, self._samples
        everything = chain.from_iterable(sample.tokens[sample.prompt_length :] for sample in samples)
        tokens = np.fromiter(everything, np.int32, len(self._row))
        known, which = np.unique(tokens, return_inverse=True)
        texts = pa.array([_valid(pieces(int(token))) for token in known], pa.string())
        worst, token = self._worst()
        offsets = _offsets(self._lengths)
        values = pa.DictionaryArray.from_arrays(pa.array(which.astype(np.int32)), texts)
        return {
            "line": pa.array([row.line for row in rows], pa.int32()),
            "group": pa.array([sample.group_index for sample in samples], pa.int64()),
            "index": pa.array([sample.index for sample in samples], pa.int64()),
            "step": pa.array([row.step for row in rows], pa.int32()),
            "flag": pa.array([row.flag for row in rows], pa.string()),
            "gap_max": pa.array(worst, pa.float32(), mask=worst < 0),
            "gap_token": pa.array(token, pa.int32(), mask=worst < 0),
            "tokens": pa.ListArray.from_arrays(offsets, pa.array(tokens)),
            "pieces": pa.ListArray.from_arrays(offsets, values),
        }

    def _worst(self) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """[R] the largest absolute gap, -1 if there is none, and the token that has it."""
        worst, token = np.full(len(self._rows), -1, dtype=np.float32), np.zeros(len(self._rows), dtype=np.int32)
        if "gap" in self._columns:
            size = np.nan_to_num(np.abs(self._columns["gap"][0]), nan=-1.0)
            np.maximum.at(worst, self._row, size)
            here = np.flatnonzero(size == worst[self._row])[::-1]
            token[self._row[here]] = here - (self._ends - self._lengths)[self._row[here]]
        return worst, token

    def _list(self, name: str) -> pa.Array:
        numbers, absent = self._columns[name]
        numbers = numbers[~absent[self._row]]
        if name in _WHOLE:
            kind, unknown = _WHOLE[name]
            numbers = np.where(np.isnan(numbers), unknown, numbers).astype(kind)
        offsets = _offsets(np.where(absent, 0, self._lengths))
        return pa.ListArray.from_arrays(offsets, pa.array(numbers), mask=pa.array(absent))


def _offsets(lengths: NDArray[np.int64]) -> pa.Array:
    """Where the list of each row begins, and where the last one ends."""
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _only_version(sample: Sample) -> float:
    """The weight version of the whole response; NaN if there are several, or it is no number."""
    versions = sample.weight_versions
    return float(versions[0]) if len(versions) == 1 and versions[0].isdecimal() else np.nan


def _valid(text: str) -> str:
    """The text with lone surrogates replaced, which are not valid UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
