"""One exception tree.

Rules.  Everything slime raises on purpose derives from `SlimeError`, so the command line can tell a
message for the user from a bug.  Each class also derives from the standard exception it refines, and
survives pickling (it crosses Ray), so it takes one message argument.  Plugin code raises ordinary
Python errors; the boundary that called it turns them into a `PluginError` that names the plugin.
A message says where, what was got, what was expected and what to do.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

from slime.errors.redaction import without_credentials


class SlimeError(Exception):
    """Root of everything slime raises on purpose.  `exit_code` is what the command line returns."""

    exit_code = 1


class ConfigError(SlimeError, ValueError):
    """The run as described cannot work: a flag, a file or a combination of them.  Exit code 2."""

    exit_code = 2


class DataError(ConfigError):
    """A data file is missing, unreadable, empty or malformed."""


class PluginError(SlimeError, RuntimeError):
    """A plugin is at fault; the message names it."""


class PluginLoadError(PluginError):
    """A plugin could not be imported or does not describe itself properly."""

    exit_code = 2


class PluginNotFoundError(PluginLoadError, LookupError):
    """No installed plugin provides the component the run names."""


class PluginConflictError(PluginLoadError):
    """Two plugins claim the same name."""


class PluginContractError(PluginError):
    """A component returned something its contract forbids."""


class ErrorBudgetError(PluginError):
    """A component failed more of its samples than the run allows (`error_budget`)."""


class ClusterError(SlimeError, RuntimeError):
    """A part of Ray, or a node of the cluster, was lost."""


class ClusterStartError(ClusterError):
    """Ray did not start, or the cluster to join does not answer."""


class ProcessDiedError(SlimeError, RuntimeError):
    """A process of the run ended before its time, or hangs; the message names it and what is known of the cause."""


class EngineError(SlimeError, RuntimeError):
    """An SGLang engine or the router failed, died or did not answer in time."""


class EngineStartError(EngineError):
    """An engine or the router did not come up: most often an option it refuses.  Exit code 2."""

    exit_code = 2


class EngineRefusedError(EngineError):
    """An engine or the router works, and refuses what it is asked to do."""


class NoEngineError(EngineError):
    """No engine took a request, so nothing was generated: it may be sent again."""


class GarbledAnswerError(EngineError):
    """An engine answered a request with something else than a response."""

    def __init__(self, message: str, url: str = "") -> None:
        """`url`: the engine, if it was asked directly; else the router."""
        super().__init__(message)
        self.url = url


class RequestRefusedError(SlimeError, ValueError):
    """A healthy engine refuses one request (too long, malformed): the sample is at fault, not the engine."""


class TrainerError(SlimeError, RuntimeError):
    """A Megatron rank failed."""


class WeightSyncError(SlimeError, RuntimeError):
    """The engines' weights are not, or may not be, the trainer's."""

    def __init__(self, message: str, urls: Sequence[str] = ()) -> None:
        """`urls`: the engines that failed or did not answer in time, if they are known."""
        super().__init__(message)
        self.urls = list(urls)


class CheckpointError(SlimeError, RuntimeError):
    """A checkpoint is missing, damaged, incomplete or belongs to another run.  Exit code 2."""

    exit_code = 2


class CheckpointWriteError(CheckpointError):
    """A checkpoint or a model could not be written: most often the disk.  The same command may be tried again."""

    exit_code = 1


class SandboxError(SlimeError, RuntimeError):
    """An untrusted program could not be sandboxed: the machine or the caller is at fault, not the program."""


class DiskFullError(SlimeError, OSError):
    """A file could not be written because no space, or none of the user's quota, is left."""


class UnexpectedError(SlimeError, RuntimeError):
    """Code of slime or of a library raised what nobody foresaw, in another process; the message is its traceback."""


class DeadlineError(SlimeError, TimeoutError):
    """A wait ran past its deadline; the message names what was waited for."""


class PreemptedError(SlimeError):
    """SIGTERM ended a run that saves checkpoints.  Exit code 143, as of a program that SIGTERM ends."""

    exit_code = 143


class TerminatedInterrupt(KeyboardInterrupt):
    """SIGTERM, where nothing answers it in another way: ends everything as Ctrl-C does.  Exit code 143."""


_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def one_line(error: BaseException) -> str:
    """`ValueError: the message`, in one line, without colours and credentials in addresses.

    Never raises, whatever the error's `str()` does.
    """
    try:
        message = without_credentials(" ".join(without_escapes(str(error)).split()))
    except Exception as broken:  # noqa: BLE001 - somebody else's code
        message = f"(its str() raises {type(broken).__name__})"
    if isinstance(error, BaseExceptionGroup):
        message += f", the first: {one_line(error.exceptions[0])}"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def without_escapes(text: str) -> str:
    """`text` without the escape sequences that colour a terminal."""
    return _ESCAPES.sub("", text)


def json_type(value: object) -> str:
    """The JSON type of a value, for messages: `a list`, `a number`, `null`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean X?` with the nearest known name, or an empty string when none is near.

    Leading dashes of flags and brackets of tables do not make names more alike. A name with the same words and further
    ones (`rollout-temperature` for `temperature`) is nearer than one with other letters: the one with the fewest, and
    of several the first.
    """
    bare, word = {one.strip("-[]"): one for one in known}, name.strip("-[]")
    longer = [one for one in bare if _has_words(one, word)]
    near = [min(longer, key=lambda one: len(_words(one)))] if longer else []
    near = near or difflib.get_close_matches(word, list(bare), n=1, cutoff=0.7)
    return f" Did you mean {bare[near[0]]}?" if near else ""


def _has_words(longer: str, name: str) -> bool:
    """Whether a longer name has all words of a name, in the same order."""
    words = iter(_words(longer))
    return all(word in words for word in _words(name))


def _words(name: str) -> list[str]:
    return re.split("[-_]", name)


# --- full disks ------------------------------------------------------------------------------------


_FULL = (errno.ENOSPC, errno.EDQUOT)
#: bytes of a block: with fewer free, nothing can be written
_BLOCK = 4096


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """In the body `path` is written: a full disk becomes a `DiskFullError` with the file and the free bytes."""
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        # Libraries such as safetensors raise their own error with the system's text.
        if not is_disk_full(error) and not any(os.strerror(number) in str(error) for number in _FULL):
            raise
        raise DiskFullError(disk_full(error, path)) from None


def is_disk_full(error: BaseException) -> TypeGuard[OSError]:
    """Whether an error says that there is no space left, or none of the quota."""
    return isinstance(error, OSError) and error.errno in _FULL


def disk_full(error: Exception, path: Path | None = None) -> str:
    """The message about a full disk, in one line. Without `path`, the error's own, if it has one."""
    named = getattr(error, "filename", None)
    file = path if path is not None else None if named is None else Path(str(named))
    if file is None:
        return f"{_full(error)}: {one_line(error)}"
    folder = next((parent for parent in file.absolute().parents if parent.is_dir()), Path("/"))
    return f"{_full(error)}: {file} cannot be written; {shutil.disk_usage(folder).free:,} bytes are free in {folder}"


def _full(error: BaseException) -> str:
    return "the quota is used up" if os.strerror(errno.EDQUOT) in str(error) else "the disk is full"


def disk_problem(error: BaseException, path: Path) -> str:
    """Why `path` cannot be written, in one line and with the free bytes, from the error of any library."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
    folder = next((parent for parent in path.absolute().parents if parent.is_dir()), Path("/"))
    free = shutil.disk_usage(folder).free
    # torch's own error says nothing about the disk: "enforce fail at inline_container.cc".
    hidden = free < _BLOCK and not isinstance(error, OSError)
    if hidden or any(os.strerror(number) in str(error) for number in _FULL):
        reason = _full(error)
    return f"{reason}; {free:,} bytes are free in {folder}"
