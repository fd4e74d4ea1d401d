"""The index of a run's samples: where each one lies, its numbers, and the words of its texts.

SQLite with FTS5, in a file of `slime_viewer.index_file`. It may be deleted at any time: it is built from the files, and
continued as they grow.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

import orjson

from slime.errors import DataError
from slime_viewer.index_file import delete, index_paths
from slime_viewer.index_tables import SCALARS, TABLES, VERSION
from slime_viewer.lines import Line, complete_lines, open_regular
from slime_viewer.run_files import RunFolder, SampleFile
from slime_viewer.sample_fields import scalars_of, words_of
from slime_viewer.tokens import read_extremes, tokens_path

#: lines, and bytes of them, that are written at once: who reads waits for it
_BATCH, _BATCH_BYTES = 2000, 4 * 2**20
#: seconds to wait for another process that writes to the index
_BUSY_S = 30.0
#: bytes of the disk that an index leaves free, unless it needs few of them
_KEEP_FREE = 2**30
#: in place of the size of a file that was deleted
_GONE = -1
#: bytes at both ends of what was read of a file, by which it is known again
_MARK_BYTES = 4096
_INSERT = (
    f"INSERT INTO samples (file, line, offset, length, {', '.join(SCALARS)})"
    f" VALUES ({', '.join('?' * (4 + len(SCALARS)))})"
)


@dataclass(frozen=True)
class IndexState:
    """How far an index is."""

    samples: int
    #: bytes of sample files that it covers, and that there are
    done: int
    total: int
    #: what could not be read, in words
    problems: list[str]


class RunIndex:
    """The index of one run. Every thread, and every process, opens one of its own."""

    def __init__(
        self, folder: RunFolder, path: Path | None, files: Sequence[SampleFile] | None = None, *, words: bool = True
    ) -> None:
        """Open or make an index; `open_index` knows where it lies.

        Args:
            folder: The run.
            path: Its file; None: in memory, for as long as this object lives.
            files: The sample files to cover instead of all.
            words: Whether texts can be searched for.

        Raises:
            sqlite3.Error: The file cannot be written, or is no index of this version.
        """
        self.folder, self.path = folder, path
        #: bytes of sample files that this object has read
        self.bytes_read = 0
        self._files, self._words = files, words
        self._ended = False
        self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        place = ":memory:" if self.path is None else self.path
        db = sqlite3.connect(place, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            # The index can be built anew, so that a crash may damage it.
            db.execute("PRAGMA synchronous = OFF")
            # Else a large transaction locks out the readers before its end.
            db.execute("PRAGMA cache_spill = OFF")
            # Also where nothing is to be made: it shows that the file can be written.
            db.execute("BEGIN IMMEDIATE")
            if _version(db) != VERSION:
                if db.execute("SELECT 1 FROM sqlite_master").fetchone():
                    error = sqlite3.DatabaseError("it is of another version of slime")
                    error.sqlite_errorcode = sqlite3.SQLITE_NOTADB
                    raise error
                for statement in TABLES.split(";\n"):
                    db.execute(statement)
            db.execute("SELECT count(*) FROM files")
            db.execute("COMMIT")
        except sqlite3.Error:
            db.close()
            raise
        return db

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def interrupt(self) -> None:
        """End a question that another thread waits for; all later ones are errors."""
        self._ended = True
        self._db.interrupt()

    def query(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query. Raises `DataError`."""
        if self._ended:
            raise DataError("the index of the samples is being closed")
        try:
            return self._db.execute(sql, tuple(parameters)).fetchall()
        except sqlite3.Error as error:
            raise DataError(f"the index of the samples, {self.path}, cannot be read: {error}") from None
        except OverflowError:
            raise DataError("a number has more than 63 bits; no sample has one") from None
        except UnicodeEncodeError:
            raise DataError("a text has signs that are none of Unicode; no sample has one") from None

    def in_order(self) -> bool:
        """Whether samples were indexed in the order of their steps: not if a step was repeated, or samples failed."""
        return not self.query("SELECT 1 FROM disorder LIMIT 1")

    # --- building ----------------------------------------------------------------------------------

    def refresh(self, stopped: Callable[[], bool] = lambda: False) -> int:
        """Read what is new, in batches that are visible at once; `stopped` ends it between two of them.

        Returns:
            How many samples were added.

        Raises:
            DataError: The index cannot be written, or would fill the disk.
        """
        added, present = 0, set()
        try:
            self._leave_room()
            # One question for all files: a long run has ten thousand, and this is asked again every second.
            known = {name: tuple(rest) for name, *rest in self.query("SELECT name, changed, size, trouble FROM files")}
            for file in self.files():
                present.add(file.path.name)
                for batch in self._read(file, known.get(file.path.name)):
                    added += batch
                    self._leave_room()
                    if stopped():
                        return added
            if self._read_all_tokens(stopped):
                return added
            if self._files is None:
                self._forget(present)
        except sqlite3.Error as error:
            raise DataError(f"the index {self.path} cannot be written: {error}") from None
        return added

    def _leave_room(self) -> None:
        """End the reading before the disk is full: the run may write to it too. An index is as large as its samples."""
        if self.path is None or (free := shutil.disk_usage(self.path.parent).free) >= _KEEP_FREE:
            return
        state = self.state()
        rest = state.total - state.done
        if rest > free / 4:
            raise DataError(
                f"the index {self.path} covers {state.samples:,} samples and is not continued: about"
                f" {rest / 2**20:,.0f} MiB are missing, and its disk has {free / 2**20:,.0f} MiB left. Free some, or"
                " set XDG_CACHE_HOME to a folder on another disk"
            )

    def files(self) -> Sequence[SampleFile]:
        """The sample files that the index covers."""
        return list(self.folder.sample_files()) if self._files is None else self._files

    def _read(self, file: SampleFile, known: tuple[Any, ...] | None) -> Iterator[int]:
        """Add the new lines of a file, and yield after each batch how many. The page shows why one cannot be read.

        Args:
            file: The file.
            known: When it had last changed, its size and what was wrong with it, if it is in the index.
        """
        try:
            now = os.stat(file.path)
            if known == (now.st_ctime_ns, now.st_size, None):
                return
            with open_regular(file.path) as opened:
                yield from self._read_on(file, opened)
        except FileNotFoundError:
            return  # deleted meanwhile
        except OSError as error:
            trouble = error.strerror or str(error)
            if known is None or known[-1] != trouble:
                self._db.execute(
                    "INSERT INTO files (name, trouble) VALUES (?, ?)"
                    " ON CONFLICT (name) DO UPDATE SET trouble = excluded.trouble",
                    (file.path.name, trouble),
                )

    def _read_on(self, file: SampleFile, opened: BinaryIO) -> Iterator[int]:
        now = os.fstat(opened.fileno())
        with self._transaction():
            number, done = self._place(file, opened)
        for batch in _batches(complete_lines(opened, done)):
            end = batch[-1].offset + batch[-1].length
            mark = _mark(opened, end)
            with self._transaction():
                if self.query("SELECT done FROM files WHERE id = ?", [number]) != [(done,)]:
                    return  # another process reads the same file
                added = self._add(number, file, batch)
                self._db.execute(
                    "UPDATE files SET done = ?, mark = ?, broken = broken + ? WHERE id = ?",
                    (end, mark, len(batch) - added, number),
                )
            self.bytes_read += end - done
            done = end
            yield added
        with self._transaction():
            # Only now, so that a file whose reading was interrupted is continued.
            self._db.execute(
                "UPDATE files SET changed = ?, size = ?, trouble = NULL WHERE id = ? AND done = ?",
                (now.st_ctime_ns, now.st_size, number, done),
            )

    def _place(self, file: SampleFile, opened: BinaryIO) -> tuple[int, int]:
        """The number of a file, and the byte to read on from: 0 if it was written anew."""
        known = self.query("SELECT id, done, mark FROM files WHERE name = ?", [file.path.name])
        if known:
            number, done, mark = known[0]
            if not done or mark == _mark(opened, done):
                return number, done
            self._delete_samples(number)
            self._db.execute("DELETE FROM files WHERE id = ?", [number])
        [(last,)] = self.query("SELECT max(step) FROM samples")
        made = self._db.execute("INSERT INTO files (name) VALUES (?)", [file.path.name])
        assert made.lastrowid is not None
        if file.step is None or (last is not None and file.step < last):
            self._db.execute("INSERT INTO disorder VALUES (?)", [made.lastrowid])
        return made.lastrowid, 0

    def _add(self, number: int, file: SampleFile, batch: list[Line]) -> int:
        [(line_number,)] = self.query("SELECT coalesce(max(line) + 1, 0) FROM samples WHERE file = ?", [number])
        added = 0
        for line in batch:
            if line.row is None:
                continue
            try:
                scalars, words = scalars_of(file, line.row), words_of(line.row) if self._words else ""
            except (RecursionError, orjson.JSONEncodeError):  # hundreds of lists within each other
                continue
            place = (number, line_number + added, line.offset, line.length)
            made = self._db.execute(_INSERT, (*place, *scalars, self._uses(number, file, scalars), None, None))
            if self._words:
                self._db.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (made.lastrowid, words))
            added += 1
        return added

    def _uses(self, number: int, file: SampleFile, scalars: Sequence[object]) -> int:
        """How many other rollouts that are indexed already were trained on a sample."""
        about = dict(zip(SCALARS, scalars, strict=False))
        if file.kind != "train" or about["idx"] is None or about["grp"] is None:
            return 0
        [(uses,)] = self.query(
            "SELECT count(*) FROM samples WHERE prompt = ? AND idx = ? AND grp = ? AND kind = 'train' AND file != ?",
            (about["prompt"], about["idx"], about["grp"], number),
        )
        return int(uses)

    def _forget(self, present: set[str]) -> None:
        """Remove the samples of files that were deleted: their texts cannot be shown any more. The names are kept."""
        known = self.query("SELECT id, name FROM files WHERE size != ?", [_GONE])
        for number in (number for number, name in known if name not in present):
            with self._transaction():
                self._delete_samples(number)
                self._db.execute(
                    "UPDATE files SET size = ?, done = 0, broken = 0, trouble = NULL WHERE id = ?", [_GONE, number]
                )

    def _delete_samples(self, number: int) -> None:
        for table in ("samples", "extremes", "token_files"):
            self._db.execute(f"DELETE FROM {table} WHERE file = ?", [number])

    def _read_all_tokens(self, stopped: Callable[[], bool]) -> bool:
        """Take over what the files of tokens beside the files of samples say, if it is new; whether it was stopped."""
        there = self.folder.sample_names()
        select = "SELECT name, files.id, token_files.changed FROM files LEFT JOIN token_files ON file = files.id"
        known = {name: (number, changed) for name, number, changed in self.query(select)}
        for file in self.files():
            name, path = file.path.name, tokens_path(file.path)
            # Most files have none.
            if path.name in there and name in known:
                self._read_tokens(path, *known[name])
            if stopped():
                return True
        return False

    def _read_tokens(self, path: Path, number: int, known: int | None) -> None:
        """Index a file of tokens, unless it is as it was at `known`; `number`: id of its file of samples."""
        trouble = None
        try:
            changed = os.stat(path).st_ctime_ns
        except OSError:
            return  # deleted meanwhile
        if changed == known:
            return
        try:
            extremes, flagged = read_extremes(path)
        except (OSError, DataError) as error:
            trouble, extremes, flagged = str(error), [], []
        with self._transaction():
            self._db.execute("DELETE FROM extremes WHERE file = ?", [number])
            self._db.execute("INSERT OR REPLACE INTO token_files VALUES (?, ?, ?)", [number, changed, trouble])
            self._db.executemany(
                "INSERT INTO extremes VALUES (?, ?, ?, ?, ?, ?)",
                [(number, one.line, one.column, one.position, one.value, one.piece) for one in extremes],
            )
            self._db.executemany(
                "UPDATE samples SET flag = ?, gap = ? WHERE file = ? AND line = ?",
                [(one.flag, one.gap, number, one.line) for one in flagged],
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # some errors, such as a full disk, end it
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def state(self) -> IndexState:
        """How far the index is, and what it could not read."""
        [(samples,)] = self.query("SELECT count(*) FROM samples")
        known = {name: rest for name, *rest in self.query("SELECT name, done, broken, trouble FROM files")}
        total = covered = 0
        problems = []
        problems += [trouble for (trouble,) in self.query("SELECT trouble FROM token_files WHERE trouble IS NOT NULL")]
        present = self.files()
        if self._files is None and (gone := len(known.keys() - {file.path.name for file in present})):
            problems.append(f"files of samples that were deleted after they were indexed: {gone}")
        for file in present:
            done, broken, trouble = known.get(file.path.name, (0, 0, None))
            if trouble:
                problems.append(f"{file.path.name} cannot be read: {trouble}")
            try:
                now = os.stat(file.path)
            except OSError:
                continue
            if S_ISREG(now.st_mode) and not trouble:
                total, covered = total + now.st_size, covered + min(done, now.st_size)
            if broken:
                problems.append(f"{file.path.name}: {broken} lines are no samples in JSON and are left out")
        return IndexState(samples, covered, total, problems)


def _batches(lines: Iterable[Line]) -> Iterator[list[Line]]:
    batch: list[Line] = []
    room = _BATCH_BYTES
    for line in lines:
        batch.append(line)
        room -= line.length
        if room <= 0 or len(batch) == _BATCH:
            yield batch
            batch, room = [], _BATCH_BYTES
    if batch:
        yield batch


def _mark(opened: BinaryIO, done: int) -> str:
    """A digest of both ends of the first `done` bytes: a file that was written anew has another one."""
    length = min(done, _MARK_BYTES)
    ends = (os.pread(opened.fileno(), length, offset) for offset in (0, done - length))
    return hashlib.blake2b(b"".join(ends), digest_size=16).hexdigest()


def _version(db: sqlite3.Connection) -> int:
    [(version,)] = db.execute("PRAGMA user_version")
    return int(version)


def open_index(folder: RunFolder) -> RunIndex:
    """The index of a run on disk. One that is damaged, or of another version, is built anew.

    Raises:
        DataError: Another process does not let go of it, or it can be written nowhere.
    """
    refused = []
    for path in index_paths(folder.path):
        for _ in range(2):
            try:
                return RunIndex(folder, path)
            except sqlite3.Error as error:
                cause = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF  # without its details
                if cause in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    told = f"the index {path} is in use by another process, for {_BUSY_S:g} s; try again"
                    raise DataError(told) from None
                if cause not in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                    # Such as a full disk, or a file system without locks.
                    refused.append(f"{path}: {error}")
                    break
                delete(path)
    raise DataError(
        f"the index of {folder.path} can be written nowhere ({'; '.join(refused) or 'no folder of your own for it'});"
        " set XDG_CACHE_HOME to a folder that you can write"
    )
