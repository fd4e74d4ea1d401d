"""What other people's code raised: where in their code, with the traceback, and who can repair it."""

from __future__ import annotations

import functools
import importlib.metadata
import linecache
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from slime.errors import (
    PluginContractError,
    PluginError,
    SlimeError,
    disk_full,
    is_disk_full,
    one_line,
    without_escapes,
)
from slime.errors.redaction import without_credentials

logger = logging.getLogger(__name__)

#: lines of log files
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: attribute of a log record that is for files alone, because the terminal gets a shorter message
ONLY_IN_LOGS = "slime_only_in_logs"
#: packages that call a plugin's code on slime's behalf
_CALLERS = frozenset(("slime", "pluggy", "importlib_metadata", "ray", "megatron"))
#: lines of a traceback that are shown on the terminal
_TAIL = 6


@dataclass(frozen=True, slots=True)
class Raised:
    """What a component's code raised, as text: the exception itself may not pickle, or not be known elsewhere."""

    #: `ValueError: the message`, in one line
    error: str
    #: FILE:LINE in the component's code; empty if it has no file
    where: str
    #: from the component's first frame on
    traceback: str
    #: what to do, for the person who can do it
    remedy: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """The text of an exception."""
        cause = error
        while isinstance(cause, BaseExceptionGroup) and _entry(cause.exceptions[0].__traceback__) is not None:
            cause = cause.exceptions[0]
        file, line = _place(cause)
        where = f"{file}:{line}" if file else ""
        return cls(one_line(error), where, _formatted(error), _remedy(file, line, cause))

    def __str__(self) -> str:
        """`FILE:LINE: ValueError: the message`."""
        return f"{self.where}: {self.error}" if self.where else self.error

    def log(self, component_name: str) -> None:
        """Write the whole traceback to the log of this process."""
        logger.error("%s raised %s\n%s", component_name, self.error, self.traceback, extra={ONLY_IN_LOGS: True})

    def tail(self) -> str:
        """The last lines of the traceback, indented, for a terminal."""
        lines = [line for line in self.traceback.splitlines() if line.strip(" ^~|+-")]
        return "\n".join(f"    {line}" for line in lines[-_TAIL:])

    def explained(self, component_name: str) -> str:
        """The message of the error that the component caused: what, where, the last lines, and the remedy."""
        log = log_of_this_process()
        full = f" The full traceback is in {log}." if log is not None else ""
        return f"{component_name}: {self}\n{self.tail()}\n  {self.remedy}{full}"


@contextmanager
def naming(component_name: str, doing: str = "") -> Iterator[None]:
    """Errors raised in the body name the component. The body calls it without awaiting.

    Args:
        component_name: For example `data source math/curriculum (slime-math 0.3.1)`.
        doing: What the component was doing, if the error alone would not say.

    Raises:
        PluginContractError: A check of the contract failed.
        PluginError: The component raised an exception that is not slime's own, `SystemExit` included.
    """
    try:
        yield
    except PluginContractError as error:
        raise PluginContractError(f"{component_name} {error}") from None
    except SlimeError:
        raise
    except BaseException as error:
        raise PluginError(report(component_name + doing, error)) from error


def report(component_name: str, error: BaseException) -> str:
    """Log the traceback of what a component raised, and return the message about it."""
    if is_disk_full(error):
        return f"{component_name}: {disk_full(error)}"
    raised = Raised.of(error)
    raised.log(component_name)
    return raised.explained(component_name)


def log_of_this_process() -> Path | None:
    """The file that this process's log records go to; None if there is none.

    In the driver it is the log of the run, in other processes the file that standard error goes to.
    """
    for handler in logging.getLogger("slime").handlers:
        if isinstance(handler, logging.FileHandler):
            return Path(handler.baseFilename)
    if not logging.getLogger().handlers:
        return None
    try:
        path = Path(os.readlink("/proc/self/fd/2"))
        return path if path.is_file() else None
    except OSError:
        return None


def _calls(frame: FrameType) -> bool:
    """Whether a frame is not a component's own: of slime, of what calls plugins, or of the standard library."""
    root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return root in _CALLERS or root in sys.stdlib_module_names


def _entry(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame of the component's code on."""
    while trace is not None and _calls(trace.tb_frame):
        trace = trace.tb_next
    return trace


def _place(error: BaseException) -> tuple[str, int]:
    """File and line of the component's code nearest to the error; an empty file if there is none."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return error.filename, error.lineno or 1
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(_entry(error.__traceback__))
        if not _calls(frame) and not frame.f_code.co_filename.startswith("<")
    ]
    if not frames:  # an error of slime's own code
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        return frames[-1] if frames else ("", 0)
    # The last line of the component itself, not of the libraries that it uses.
    home = _installed_in(frames[0][0])
    return next(place for place in reversed(frames) if _installed_in(place[0]) == home)


def _installed_in(file: str) -> str | None:
    """The top-level package or module of an installed file; None for a file outside `site-packages`."""
    match = re.search(r"/(?:site|dist)-packages/([^/]+)", file)
    return None if match is None else match[1].removesuffix(".py")


def _formatted(error: BaseException) -> str:
    entry = _entry(error.__traceback__) or error.__traceback__
    text = without_escapes("".join(traceback.format_exception(type(error), error, entry)))
    return without_credentials(text).rstrip()


def _remedy(file: str, line: int, error: BaseException) -> str:
    if not file:
        return "It has no traceback in Python."
    checkout = Path(__file__).parents[3]
    package = _installed_in(file)
    names = _distributions().get(package, []) if package is not None else []
    own = [checkout / folder for folder in ("core", "plugins")]
    if "slime-rl" in names or (package is None and any(map(Path(file).is_relative_to, own))):
        # slime's own components raise RuntimeError for what others did, such as a service that answers 500, and its
        # plugins ValueError for data that they cannot use, such as a sample without a label;
        # errors of slime are for what a user can mend.
        on_purpose = linecache.getline(file, line).lstrip().startswith("raise ")
        of_kernel = package == "slime" or Path(file).is_relative_to(checkout / "core")
        noticed = on_purpose and (type(error) is RuntimeError or (type(error) is ValueError and not of_kernel))
        if noticed or isinstance(error, SlimeError):
            return "slime's own code noticed that, and did not cause it."
        return "That is code of slime itself: please report it, with the traceback."
    if not names:
        return f"Repair {file}:{line}."
    found = importlib.metadata.metadata(names[0])
    urls = [url.partition(",")[2].strip() for url in found.get_all("Project-URL") or ()]
    at = f" ({urls[0]})" if urls else ""
    return (
        f"That is code of {found['Name']} {found['Version']}: report it to its authors{at}, or install a version"
        " without the fault."
    )


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Top-level package -> the distributions that it comes from."""
    return importlib.metadata.packages_distributions()
