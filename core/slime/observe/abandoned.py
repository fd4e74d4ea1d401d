"""What a run recorded after the rollouts from which it goes on: moved aside, so that it mixes with nothing new."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import orjson

from slime.errors import writing
from slime.observe.metrics import FILE_NAME
from slime.observe.samples import FOLDER

#: files of samples: of a rollout, what filters dropped from it, its columns, and an evaluation
_SAMPLES = re.compile(r"(?P<kind>eval_.*_|dropped_)?(?P<number>\d{6,})(\.tokens\.parquet|\.jsonl)")


def set_aside_records(run_dir: Path, done: int) -> Path | None:
    """Move metrics and samples of an earlier attempt that come after `done` rollouts into `RUN_DIR/abandoned_N`.

    An evaluation after exactly `done` rollouts stays. The file of metrics is shortened in place: the run has it open.

    Returns:
        The folder; None if nothing was moved.

    Raises:
        OSError: The run folder cannot be written.
    """
    path = run_dir / FILE_NAME
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    later = [line for line in lines if _is_later(line, done)]
    folder = run_dir / FOLDER
    files = [file for file in sorted(folder.iterdir()) if _has_later(file.name, done)] if folder.is_dir() else []
    if not later and not files:
        return None
    aside = next(one for n in itertools.count(1) if not (one := run_dir / f"abandoned_{n}").exists())
    with writing(aside):
        (aside / FOLDER).mkdir(parents=True)
        (aside / FILE_NAME).write_bytes(b"".join(later))
        for file in files:
            file.rename(aside / FOLDER / file.name)
    kept = b"".join(line for line in lines if not _is_later(line, done))
    with writing(path), path.open("r+b") as stream:
        stream.write(kept)
        stream.truncate()
    return aside


def _is_later(line: bytes, done: int) -> bool:
    """Whether a line of metrics is of a step that is taken again, or of an evaluation after one."""
    try:
        row: dict[str, Any] = orjson.loads(line)
        step = int(row["step"])
    except (ValueError, KeyError, TypeError):  # a line cut short by a kill
        return False
    of_evaluation = all(name.startswith("eval/") or name in ("step", "unix_time") for name in row)
    return step > done or (step == done and not of_evaluation)


def _has_later(name: str, done: int) -> bool:
    """Whether a file has samples of a rollout that is generated again, or of an evaluation after one."""
    if (match := _SAMPLES.fullmatch(name)) is None:
        return False
    number = int(match["number"])
    return number > done or (number == done and not str(match["kind"] or "").startswith("eval_"))
