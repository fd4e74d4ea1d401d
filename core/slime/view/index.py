"""The index of a run's samples: where each one lies, its numbers, and the words of its texts.

SQLite with FTS5. It lies in the run folder as `index.sqlite`, or, where that cannot be written, in the user's cache
folder. It may be deleted at any time: it is built from the files, and continued as they grow.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from slime.errors import DataError
from slime.view.filters import searchable
from slime.view.lines import Line, complete_lines
from slime.view.run_files import RunFolder, SampleFile

FILE_NAME = "index.sqlite"
#: of the tables below; an index of another version is built anew
VERSION = 1
#: lines that are written at once
_BATCH = 2000
#: seconds to wait for another process that writes to the index
_BUSY_S = 30.0
#: in place of the inode of a file that was deleted
_GONE = -1
#: columns of `samples` that are shown and sorted by
SCALARS = (
    *("kind", "step", "name", "grp", "idx", "prompt", "reward", "status", "tokens", "prompt_tokens", "trained"),
    *("turns", "finish", "version", "dropped", "failure"),
)
_TABLES = f"""
CREATE TABLE files (id INTEGER PRIMARY KEY, name TEXT UNIQUE, inode INT, mtime INT, size INT, done INT, broken INT);
CREATE TABLE samples (
    id INTEGER PRIMARY KEY AUTOINCREMENT, file INT, line INT, offset INT, length INT, {", ".join(SCALARS)}
);
CREATE VIRTUAL TABLE texts USING fts5(text, content='');
CREATE INDEX by_group ON samples (file, grp);
CREATE INDEX by_prompt ON samples (prompt);
CREATE INDEX by_step ON samples (kind, step);
CREATE INDEX by_reward ON samples (kind, reward);
CREATE INDEX by_tokens ON samples (kind, tokens);
PRAGMA user_version = {VERSION};
"""
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


def prompt_id(prompt: object) -> str:
    """A short name of a prompt, the same in every run."""
    return hashlib.blake2b(orjson.dumps(prompt), digest_size=8).hexdigest()


def score(reward: object) -> float | None:
    """The number that an estimator sees of a reward."""
    value = reward.get("score") if isinstance(reward, dict) else reward
    return float(value) if isinstance(value, int | float) else None


def prompt_text(prompt: object) -> str:
    """A prompt as text: a conversation's messages, one after another."""
    if isinstance(prompt, list):
        return "\n".join(message_text(message) for message in prompt)
    return prompt if isinstance(prompt, str) else "" if prompt is None else orjson.dumps(prompt).decode()


def message_text(message: object) -> str:
    """The text of one message, whatever its parts are."""
    content = message.get("content") if isinstance(message, dict) else message
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


class RunIndex:
    """The index of one run. Every thread, and every process, opens one of its own."""

    def __init__(self, folder: RunFolder, path: Path | None, files: Sequence[SampleFile] | None = None) -> None:
        """Open or make an index.

        Args:
            folder: The run.
            path: Its file; None: in memory, for as long as this object lives.
            files: The sample files to cover instead of all.

        Raises:
            DataError: The file cannot be written.
        """
        self.folder, self.path = folder, path
        self._files = files
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as error:
            raise DataError(f"the index {path} cannot be opened: {error}; delete it, and it is built anew") from None

    def _open(self) -> sqlite3.Connection:
        if self.path is None:
            db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        else:
            db = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            # The index can be built anew, so that a crash may damage it.
            db.execute("PRAGMA synchronous = OFF")
        try:
            if _version(db) != VERSION:
                # Only one of two processes makes the tables.
                db.execute("BEGIN IMMEDIATE")
                if _version(db) != VERSION:
                    if db.execute("SELECT 1 FROM sqlite_master").fetchone():
                        raise sqlite3.DatabaseError("it is of another version of slime")
                    for statement in _TABLES.split(";\n"):
                        db.execute(statement)
                db.execute("COMMIT")
        except sqlite3.DatabaseError:
            db.close()
            raise
        return db

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def query(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        return self._db.execute(sql, tuple(parameters)).fetchall()

    # --- building ----------------------------------------------------------------------------------

    def refresh(self, stopped: Callable[[], bool] = lambda: False) -> int:
        """Read what is new, in batches that are visible at once; `stopped` ends it between two of them.

        Returns:
            How many samples were added.

        Raises:
            DataError: The index cannot be written.
        """
        added, present = 0, set()
        try:
            for file in self.files():
                present.add(file.path.name)
                for batch in self._read(file):
                    added += batch
                    if stopped():
                        return added
            if self._files is None:
                self._forget(present)
        except sqlite3.Error as error:
            raise DataError(f"the index {self.path} cannot be written: {error}") from None
        return added

    def files(self) -> Sequence[SampleFile]:
        """The sample files that the index covers."""
        return list(self.folder.sample_files()) if self._files is None else self._files

    def _read(self, file: SampleFile) -> Iterator[int]:
        """Add the new lines of a file; yields how many after each batch."""
        try:
            stat = file.path.stat()
            known = self.query("SELECT inode, mtime, size FROM files WHERE name = ?", [file.path.name])
            if known == [(stat.st_ino, stat.st_mtime_ns, stat.st_size)]:
                return
            with self._transaction():
                number, done = self._place(file, stat)
            with file.path.open("rb") as opened:
                lines = complete_lines(opened, done)
                while batch := list(islice(lines, _BATCH)):
                    with self._transaction():
                        if self.query("SELECT done FROM files WHERE id = ?", [number]) != [(done,)]:
                            return  # another process reads the same file
                        added = self._add(number, file, batch)
                    yield added
                    done = batch[-1].offset + batch[-1].length
            with self._transaction():
                # Only now, so that a file whose reading was interrupted is continued.
                self._db.execute(
                    "UPDATE files SET inode = ?, mtime = ?, size = ? WHERE id = ? AND done = ?",
                    (stat.st_ino, stat.st_mtime_ns, stat.st_size, number, done),
                )
        except FileNotFoundError:
            return  # deleted meanwhile

    def _place(self, file: SampleFile, stat: os.stat_result) -> tuple[int, int]:
        """The number of a file, and the byte to read on from: 0 if it was replaced."""
        known = self.query("SELECT id, inode, done FROM files WHERE name = ?", [file.path.name])
        if known:
            number, inode, done = known[0]
            if inode == stat.st_ino and done <= stat.st_size:
                return number, done
            self._db.execute("DELETE FROM samples WHERE file = ?", [number])
            self._db.execute("DELETE FROM files WHERE id = ?", [number])
        made = self._db.execute(
            "INSERT INTO files (name, inode, mtime, size, done, broken) VALUES (?, ?, 0, 0, 0, 0)",
            (file.path.name, stat.st_ino),
        )
        assert made.lastrowid is not None
        return made.lastrowid, 0

    def _add(self, number: int, file: SampleFile, batch: list[Line]) -> int:
        [(line_number,)] = self.query("SELECT coalesce(max(line) + 1, 0) FROM samples WHERE file = ?", [number])
        added = 0
        for line in batch:
            if line.row is None:
                continue
            try:
                scalars, words = _scalars(file, line.row), _words(line.row)
            except (RecursionError, orjson.JSONEncodeError):  # hundreds of lists within each other
                continue
            made = self._db.execute(_INSERT, (number, line_number + added, line.offset, line.length, *scalars))
            self._db.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (made.lastrowid, words))
            added += 1
        self._db.execute(
            "UPDATE files SET done = ?, broken = broken + ? WHERE id = ?",
            (batch[-1].offset + batch[-1].length, len(batch) - added, number),
        )
        return added

    def _forget(self, present: set[str]) -> None:
        """Remove the samples of files that were deleted: their texts cannot be shown any more. The names are kept."""
        known = self.query("SELECT id, name FROM files WHERE inode != ?", [_GONE])
        for number in (number for number, name in known if name not in present):
            with self._transaction():
                self._db.execute("DELETE FROM samples WHERE file = ?", [number])
                self._db.execute("UPDATE files SET inode = ?, done = 0, broken = 0 WHERE id = ?", [_GONE, number])

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
        known = {name: (done, broken) for name, done, broken in self.query("SELECT name, done, broken FROM files")}
        total = covered = 0
        problems = []
        present = self.files()
        if self._files is None and (gone := len(known.keys() - {file.path.name for file in present})):
            problems.append(f"files of samples that were deleted after they were indexed: {gone}")
        for file in present:
            try:
                size = file.path.stat().st_size
            except OSError:
                continue
            done, broken = known.get(file.path.name, (0, 0))
            total, covered = total + size, covered + min(done, size)
            if broken:
                problems.append(f"{file.path.name}: {broken} lines are no samples in JSON and are left out")
        return IndexState(samples, covered, total, problems)


def _version(db: sqlite3.Connection) -> int:
    [(version,)] = db.execute("PRAGMA user_version")
    return int(version)


def _scalars(file: SampleFile, row: dict[str, Any]) -> tuple[object, ...]:
    """The values of `SCALARS`. A field of another type than slime writes is left out."""
    messages, versions = _list(row.get("messages")), _list(row.get("weight_versions"))
    turns = sum(isinstance(one, dict) and one.get("role") == "assistant" for one in messages)
    numbers = [int(one) for one in versions if isinstance(one, str) and one.isdecimal() and len(one) < 19]
    return (
        file.kind,
        file.step,
        file.name,
        _integer(row.get("group")),
        _integer(row.get("index")),
        prompt_id(row.get("prompt")),
        score(row.get("reward")),
        _string(row.get("status")),
        _integer(row.get("response_tokens")),
        _integer(row.get("prompt_tokens")),
        _integer(row.get("trained_tokens")),
        turns if messages else 1,
        _string(row.get("finish_reason")),
        min(numbers, default=None),
        _string(row.get("dropped")),
        _string(row.get("failure")),
    )


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and abs(value) < 2**63 else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _words(row: dict[str, Any]) -> str:
    """All texts of a sample: its conversation, or its prompt and response."""
    messages = row.get("messages")
    said = prompt_text(messages) if isinstance(messages, list) else prompt_text(row.get("prompt"))
    return searchable(f"{said}\n{prompt_text(row.get('response'))}")


# --- where the index lies ----------------------------------------------------------------------------


def index_path(folder: RunFolder) -> Path:
    """Where the index of a run lies: in its folder, or in the user's cache if that cannot be written."""
    inside = folder.path / FILE_NAME
    if _writable(inside):
        return inside
    name = f"{hashlib.blake2b(bytes(folder.path.resolve()), digest_size=12).hexdigest()}.sqlite"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slime"
    if _writable(cache / name):
        return cache / name
    # A folder that nobody else can have made.
    return Path(tempfile.mkdtemp(prefix="slime-index-")) / name


def _writable(path: Path) -> bool:
    """Whether SQLite can write a file, and its journal beside it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
        return not path.exists() or os.access(path, os.W_OK)
    except OSError:
        return False


def open_index(folder: RunFolder) -> RunIndex:
    """The index of a run on disk. One that is damaged, or of another version, is built anew.

    Raises:
        DataError: It cannot be written.
    """
    path = index_path(folder)
    try:
        index = RunIndex(folder, path)
        with closing(index._db.execute("SELECT count(*) FROM files")):
            return index
    except (DataError, sqlite3.DatabaseError):
        path.unlink(missing_ok=True)
        return RunIndex(folder, path)
