"""The files of a checkpoint: their sizes, hashes and contents, by which damage is found before anything is loaded."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import stat
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict  # pydantic checks it, and needs this one before Python 3.12

from slime.errors import CheckpointError, CheckpointWriteError, disk_problem, one_line
from slime.run.signals import say

#: the file of a `--save` folder that names its newest checkpoint
LATEST = "latest"
#: seconds between two lines about files that are being compared
TELL_S = 5.0
#: bytes that are hashed at once
_PART = 2**22
#: no description is larger than this: such a file is there to fill the memory
_LARGEST_DESCRIPTION = 64 * 2**20
#: damaged files named in a message
_NAMED = 3
#: of the rollout part: the state of the data source with its counts, and the groups
_STATE, _GROUPS = "state.json", "groups.jsonl"
#: what the rollout process needs of the one, and of each of the others
_STATE_KEYS, _GROUP_KEYS = {"source", "dropped"}, {"index", "samples"}


class FileRecord(TypedDict):
    """What a checkpoint says about one of its files."""

    bytes: int
    sha256: str


#: path inside the checkpoint -> its record
Files = dict[str, FileRecord]


def record_files(root: Path, paths: Iterable[Path]) -> Files:
    """Hash the files at `paths`, which lie below `root`, and flush them to disk.

    Called where they were written: another machine cannot flush what this one holds in memory. Megatron does not flush
    common.pt and metadata.json, and torch flushes .metadata before its end has left Python's buffer.

    Raises:
        CheckpointError: One cannot be read, or not be flushed.
    """
    chosen = sorted(paths)
    with ThreadPoolExecutor(_threads()) as pool:
        return {
            path.relative_to(root).as_posix(): record
            for path, record in zip(chosen, pool.map(_flushed, chosen), strict=True)
        }


def check_files(root: Path, files: Mapping[str, FileRecord]) -> None:
    """Compare the files below `root` with their records; sizes first, because that takes no time.

    Raises:
        CheckpointError: Files are missing or differ; the message names them.
    """
    problems = [problem for name, record in files.items() if (problem := _wrong_size(root, name, record))]
    if not problems:
        progress = Progress(root, sum(record["bytes"] for record in files.values()))
        with ThreadPoolExecutor(_threads()) as pool:
            held = pool.map(lambda name: _record(root / name, progress.count), files)
            problems = [
                f"{name} was changed after it was saved (its sha256 is {now['sha256'][:12]}, was {was['sha256'][:12]})"
                for (name, was), now in zip(files.items(), held, strict=True)
                if now != was
            ]
    if problems:
        more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise CheckpointError(f"checkpoint {root} is damaged: {'; '.join(problems[:_NAMED])}{more}.")


class Progress:
    """Tells the user every few seconds how much of a checkpoint has been read."""

    def __init__(self, root: Path, total: int) -> None:
        """`total`: the checkpoint's size in bytes."""
        self._root, self._total = root, total
        self._read, self._told_at, self._lock = 0, time.monotonic(), threading.Lock()

    def count(self, size: int) -> None:
        """Count bytes that were read; any thread may call it."""
        with self._lock:
            self._read += size
            if time.monotonic() - self._told_at < TELL_S:
                return
            self._told_at = time.monotonic()
            read, total = self._read / 2**30, self._total / 2**30
        say(f"slime: comparing {self._root} with its hashes: {read:.1f} of {total:.1f} GiB")


def read_description(path: Path) -> str:
    """The text of a small file of a checkpoint.

    Raises:
        CheckpointError: It is missing, no plain file, too large or not UTF-8.
    """
    try:
        # A pipe would wait forever for a writer.
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is damaged: it is no plain file")
        if status.st_size > _LARGEST_DESCRIPTION:
            raise CheckpointError(
                f"{path} is damaged: it has {status.st_size} bytes, at most {_LARGEST_DESCRIPTION} can be right"
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file of a checkpoint. Raises `CheckpointError`, as `read_description` does."""
    text = read_description(path)
    try:
        return _json_object(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _json_object(text: str) -> dict[str, Any]:
    """The JSON object that a text holds. Raises `ValueError`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


def digest_of_json(value: Any) -> str:
    """Sha256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextmanager
def writing_checkpoint(checkpoint: Path) -> Iterator[None]:
    """Report errors of the disk with the checkpoint's name, and not as a bug."""
    try:
        yield
    except OSError as error:
        place = f": {error.filename}" if error.filename is not None else ""
        raise CheckpointWriteError(
            f"the checkpoint {checkpoint} could not be written{place}: {disk_problem(error, checkpoint)}"
        ) from error


def write_text(path: Path, parts: Iterable[str]) -> None:
    """Write a file and flush it to disk, so that a checkpoint only becomes visible when its bytes are there."""
    with path.open("w", encoding="utf-8") as handle:
        handle.writelines(parts)
        handle.flush()
        os.fsync(handle.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk: those of new files, and what was renamed. Raises `OSError`."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems have no such call: their server keeps a name before it answers.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def sync_folders(root: Path) -> None:
    """Flush the names in `root` and in every folder below it. Raises `OSError`."""
    for folder in (*(path for path in root.rglob("*") if path.is_dir()), root):
        sync_folder(folder)


def point_latest(root: Path, name: str) -> None:
    """Let `latest` name a checkpoint that is complete on disk. Raises `OSError`."""
    pointer = root / ".latest.partial"
    write_text(pointer, [name, "\n"])
    pointer.replace(root / LATEST)
    sync_folder(root)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that they are on disk. Raises `OSError`."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_folder(made.parent)


def _threads() -> int:
    return min(16, os.cpu_count() or 1)


def _flushed(path: Path) -> FileRecord:
    try:
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    except OSError as error:
        raise CheckpointWriteError(f"{path} could not be written: {disk_problem(error, path)}") from error
    return _record(path)


def _record(path: Path, count: Callable[[int], None] | None = None) -> FileRecord:
    """The record of a file as it is now; `count` is called with the number of bytes of each part that was hashed."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while part := stream.read(_PART):
                digest.update(part)
                if count is not None:
                    count(len(part))
            return FileRecord(bytes=stream.tell(), sha256=digest.hexdigest())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _wrong_size(root: Path, name: str, record: FileRecord) -> str | None:
    try:
        status = (root / name).stat()
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return f"{name} is no plain file"
    if status.st_size != record["bytes"]:
        return f"{name} has {status.st_size} bytes, and had {record['bytes']} when it was saved"
    return None


# --- the rollout part: JSON, which runs no code when it is read -------------------------------------


def write_rollout_part(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state that `slime.run.rollout_process.RolloutProcess.state` returns.

    The standard library's JSON reads back exactly what it wrote: floats to the last bit, NaN and lone surrogates.

    Raises:
        CheckpointError: The disk is full, for example, or a group's metadata is not JSON.
    """
    with writing_checkpoint(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / _GROUPS, map(_line, state["groups"]))
        rest = {name: value for name, value in state.items() if name != "groups"}
        write_text(folder / _STATE, [json.dumps(rest, indent=1)])


def read_rollout_part(folder: Path) -> dict[str, Any]:
    """The state that `write_rollout_part` wrote.

    Raises:
        CheckpointError: It is incomplete, or not JSON.
    """
    path = folder / _STATE
    try:
        _require_file(path)
        state = json.loads(path.read_text(encoding="ascii"))
        path = folder / _GROUPS
        _require_file(path)
        with path.open(encoding="ascii") as handle:
            groups = [json.loads(line) for line in handle]
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {folder} is incomplete: {path}: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint {folder} is damaged: {folder / _STATE} holds no JSON object")
    return {**state, "groups": groups}


def _require_file(path: Path) -> None:
    """Raise `OSError` unless `path` is a plain file; opening a pipe would wait for a writer."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no plain file")


def _line(row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointWriteError(
            f"group {row['index']} cannot be saved: {error}. What data sources and generators put on a sample"
            " (metadata, multimodal_inputs, train_metadata) must be JSON, so that a group in progress can be saved."
        ) from error


# --- what hashes do not show ----------------------------------------------------------------------


def check_content(root: Path, names: Iterable[str], rollout_part: Path) -> None:
    """Check whether the files of a checkpoint hold what their names say, which their sizes and hashes do not show.

    A file may be damaged before it is hashed, or hashed again afterwards. Loading would find that too, but only once
    all processes have started. Nothing is built from the files here: a checkpoint may come from somebody else.

    Args:
        root: The checkpoint.
        names: Its files.
        rollout_part: The folder of the rollout process, if the checkpoint has one.

    Raises:
        CheckpointError: A file is damaged; the message names it.
    """
    for name in names:
        if (check := _CHECKS.get(Path(name).name)) is not None:
            try:
                check(root / name)
            # Damaged pickles raise almost anything.
            except Exception as error:
                raise CheckpointError(
                    f"checkpoint {root} is damaged: {name} was saved so, or hashed again ({one_line(error)})."
                ) from error
    if rollout_part.is_dir():
        state = read_rollout_part(rollout_part)
        _require(state, _STATE_KEYS, f"checkpoint {root} is damaged: {rollout_part.name}/state.json")
        for number, row in enumerate(state["groups"], start=1):
            _require(row, _GROUP_KEYS, f"checkpoint {root} is damaged: {rollout_part.name}/groups.jsonl, line {number}")


def _require(value: Any, keys: set[str], what: str) -> None:
    missing = keys - value.keys() if isinstance(value, dict) else keys
    if missing:
        raise CheckpointError(f"{what} lacks {', '.join(sorted(missing))}.")


def _check_json(path: Path) -> None:
    _json_object(read_description(path))


def _check_archive(path: Path) -> None:
    """What `torch.save` writes is a zip archive with a checksum for each entry."""
    with zipfile.ZipFile(path) as archive:
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"its entry {damaged} is damaged")


class _Nothing:
    """Stands for an object of any class, and does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> _Nothing:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


class _Reader(pickle.Unpickler):
    """Reads a pickle to its end and builds nothing but lists, dictionaries and values."""

    def find_class(self, module: str, name: str) -> Any:
        del module, name
        return _Nothing


def _check_pickle(path: Path) -> None:
    with path.open("rb") as stream:
        if not isinstance(_Reader(stream).load(), _Nothing):
            raise TypeError("it is no table of the tensors of a checkpoint")


#: by name, of the files that Megatron's format has in each folder; the rest are tensors
_CHECKS: dict[str, Callable[[Path], object]] = {
    "metadata.json": _check_json,
    "common.pt": _check_archive,
    ".metadata": _check_pickle,
}
