"""Numbers of one value a token, from `rollouts/000012.tokens.parquet`: of one sample, and the extremes of a file.

Not every sample has them: a run writes what its budget allows, beginning with groups that something was odd about.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.errors import DataError, one_line
from slime_viewer.lines import open_regular

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

SUFFIX = ".tokens.parquet"
#: the newest format that this version knows
FORMAT = 1
#: bytes of a part of a file that is read at once; slime writes parts of about 4 MiB
_MAX_PART = 256 * 2**20
#: tokens of a file that are kept for each column, at either end
_KEPT = 10
#: characters of a token's text that are kept
_PIECE = 80
#: what no colour is needed for: the texts, and what says where a row belongs
_NO_COLUMN = frozenset({"tokens", "pieces"})


@dataclass(frozen=True)
class Extreme:
    """One of the highest or lowest values of a column in a file."""

    line: int
    column: str
    #: position in the response
    position: int
    value: float
    piece: str


@dataclass(frozen=True)
class Flagged:
    """What a file says of a sample as a whole."""

    line: int
    #: why its group was written: "gap", "clipped", "failed", "zero_variance" or "sampled"
    flag: str
    gap: float | None


def tokens_path(samples: Path) -> Path:
    """The file of tokens beside a file of samples."""
    return samples.with_name(samples.stem + SUFFIX)


def logged_tokens(path: Path, lengths: Mapping[int, int | None]) -> dict[int, dict[str, Any]]:
    """The columns of some samples by their lines in the file of samples; without those whose tokens were not logged.

    Args:
        path: A file of tokens.
        lengths: Line, from 0 -> tokens that the response has; None: it is not known.

    Raises:
        DataError: The file cannot be read, or is of other samples.
    """
    told: dict[int, dict[str, Any]] = {}
    with suppress(FileNotFoundError), _reading(path) as (file, names, own):
        for part in _parts(path, file):
            lines = file.read_row_group(part, columns=["line"])["line"].to_pylist()
            places = [place for place, line in enumerate(lines) if line in lengths and line not in told]
            if places:
                rows = file.read_row_group(part).take(places).to_pylist()
                told |= {row["line"]: _told(path, row, names, own, lengths[row["line"]]) for row in rows}
            if len(told) == len(lengths):
                break
    return told


#: name -> column that it is the mean of, over the tokens that have a value
_MEANS = {"advantage": "advantage", "clipped": "clipped", "entropy": "entropy", "ratio": "ratio"}


def summaries(path: Path, lines: set[int]) -> dict[int, dict[str, Any]]:
    """What the columns of some samples come to, by line; without those whose tokens were not logged.

    Of each: means of `advantage`, `clipped`, `entropy` and `ratio`, the largest `gap`, and how many tokens a tool
    (`by_tool`) or a template (`by_template`) wrote. Damaged files give none: reading their samples tells why.
    """
    told: dict[int, dict[str, Any]] = {}
    try:
        with _reading(path) as (file, names, _):
            kept = [name for name in (*_MEANS.values(), "source") if name in names]
            for part in _parts(path, file):
                table = file.read_row_group(part, columns=["line", "flag", "gap_max", *kept])
                told |= {row["line"]: _summary(row) for row in table.to_pylist() if row["line"] in lines}
    except (FileNotFoundError, DataError):
        return {}
    return told


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"flag": row["flag"], "gap": _finite(row["gap_max"])}
    for name, column in _MEANS.items():
        values = [one for one in row.get(column) or [] if _finite(one) is not None]
        if values:
            found[name] = sum(values) / len(values)
    source = row.get("source") or []
    return {**found, "by_tool": source.count(1), "by_template": source.count(2)}


@contextmanager
def _reading(path: Path) -> Iterator[tuple[pq.ParquetFile, list[str], list[str]]]:
    """`_opened`, for as long as the file is read.

    Raises:
        FileNotFoundError: There is none.
        DataError: It cannot be read.
    """
    try:
        with open_regular(path) as opened:
            yield _opened(path, opened)
    except (FileNotFoundError, DataError):
        raise
    except Exception as error:  # noqa: BLE001 - pyarrow raises errors of many classes over a damaged file
        raise DataError(f"{path.name} cannot be read: {one_line(error)}") from None


def _opened(path: Path, opened: Any) -> tuple[pq.ParquetFile, list[str], list[str]]:
    """A file, the names of its columns of tokens, and those of them that plugins have named."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Not `opened` itself: pyarrow's threads would hold its buffers, and one that frees them while the interpreter ends
    # aborts the process.
    file = pq.ParquetFile(pa.OSFile(f"/proc/self/fd/{opened.fileno()}"))
    schema = file.schema_arrow
    try:
        about = json.loads((schema.metadata or {}).get(b"slime", b"null"))
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else None
        raise DataError(f"{path.name} has format {found}; this version of slime reads {FORMAT}")
    if "line" not in schema.names or not pa.types.is_integer(schema.field("line").type):
        raise DataError(f"{path.name} has no column of whole numbers named line")
    lists = [
        field.name
        for field in schema
        if pa.types.is_list(field.type)
        and (pa.types.is_integer(field.type.value_type) or pa.types.is_floating(field.type.value_type))
        and field.name not in _NO_COLUMN
    ]
    stated, own = (_names(about.get(name)) for name in ("columns", "own"))
    order = {name: number for number, name in enumerate(stated)}
    return file, sorted(lists, key=lambda name: order.get(name, len(order))), [n for n in lists if n in own]


def _names(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _parts(path: Path, file: pq.ParquetFile) -> Iterator[int]:
    for part in range(file.metadata.num_row_groups):
        size = file.metadata.row_group(part).total_byte_size
        if size > _MAX_PART:
            raise DataError(f"{path.name} has a part of {size / 2**20:.0f} MiB; at most {_MAX_PART >> 20} MiB are read")
        yield part


def _told(path: Path, row: dict[str, Any], names: list[str], own: list[str], length: int | None) -> dict[str, Any]:
    pieces = row.get("pieces") or []
    if length is not None and len(pieces) != length:
        raise DataError(f"{path.name} is of other samples: {len(pieces)} tokens where the answer has {length}")
    values = {name: row[name] for name in names if row.get(name) is not None and len(row[name]) == len(pieces)}
    return {
        "pieces": pieces,
        "ids": row.get("tokens"),
        # JSON has no numbers that are not finite.
        "values": {name: [_finite(one) for one in column] for name, column in values.items()},
        "own": [name for name in own if name in values],
        "step": row.get("step"),
        "flag": row.get("flag"),
    }


def _finite(value: Any) -> Any:
    return value if isinstance(value, int) or (isinstance(value, float) and abs(value) < float("inf")) else None


def read_extremes(path: Path) -> tuple[list[Extreme], list[Flagged]]:
    """The highest and the lowest values of every column of a file, and what it says of its samples.

    Raises:
        FileNotFoundError: There is none.
        DataError: It cannot be read.
    """
    found: list[Extreme] = []
    flagged: list[Flagged] = []
    with _reading(path) as (file, names, _):
        for part in _parts(path, file):
            table = file.read_row_group(part)
            flagged += _flagged(table)
            found += [one for name in names for one in _extremes(table, name)]
    return [one for name in names for one in _ends([e for e in found if e.column == name])], flagged


def _ends(found: list[Extreme]) -> list[Extreme]:
    ranked = sorted(found, key=lambda one: one.value)
    return ranked if len(ranked) <= 2 * _KEPT else [*ranked[:_KEPT], *ranked[-_KEPT:]]


def _flagged(table: pa.Table) -> list[Flagged]:
    lines, flags = table["line"].to_pylist(), table["flag"].to_pylist()
    gaps = table["gap_max"].to_pylist() if "gap_max" in table.column_names else [None] * len(lines)
    return [Flagged(int(line), str(flag), _finite(gap)) for line, flag, gap in zip(lines, flags, gaps, strict=True)]


def _extremes(table: pa.Table, name: str) -> Iterator[Extreme]:
    import numpy as np

    column = table[name].combine_chunks()
    # Of a sample without the column, the list has no entries.
    values = column.flatten().to_numpy(zero_copy_only=False)
    if values.dtype.kind != "f":
        return  # masks and versions have no worst token
    rows = np.repeat(np.arange(len(column)), column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
    starts = np.searchsorted(rows, np.arange(len(column)))
    pieces = table["pieces"]
    lines = table["line"].to_numpy()
    for place in _places(values):
        row = int(rows[place])
        position = int(place - starts[row])
        texts = pieces[row].as_py() or []
        piece = texts[position][:_PIECE] if position < len(texts) else ""
        yield Extreme(int(lines[row]), name, position, float(values[place]), piece)


def _places(values: np.ndarray[Any, Any]) -> list[int]:
    """Where the highest and the lowest finite values are; none if all are equal."""
    import numpy as np

    kept = np.flatnonzero(np.isfinite(values))
    if not len(kept) or values[kept].min() == values[kept].max():
        return []
    if len(kept) <= 2 * _KEPT:
        return [int(place) for place in kept]
    ranked = kept[np.argsort(values[kept], kind="stable")]
    return [int(place) for place in (*ranked[:_KEPT], *ranked[-_KEPT:])]
