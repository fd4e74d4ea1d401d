"""Imports a user's file in a separate process, to find out what it defines before a run starts.

Whatever the file does when it is imported (hang, exit, print, raise) affects that process alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from slime.compat.signatures import Definition, definitions_in
from slime.errors import PluginLoadError, PluginNotFoundError, did_you_mean, one_line
from slime.registry.function_path import Reference, run_file

#: seconds an import may take
TIMEOUT_S = 60.0
#: seconds after that in which the process must report where it hangs
_GRACE_S = 5.0
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from slime.compat.probe import main; main(*sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class ProbedFile:
    """What a file or module defines."""

    path: Path
    source: bytes = field(repr=False)
    definitions: tuple[Definition, ...]


#: results of this process, so that each file is probed once
_found: dict[tuple[str, ...], ProbedFile] = {}


def probe(reference: Reference) -> ProbedFile:
    """What the file or module of a reference defines.

    Raises:
        PluginNotFoundError: There is no such file or module.
        PluginLoadError: It cannot be imported; the message says why, with the line.
    """
    if reference.file is not None:
        _check_file(reference.file)
    key = (str(reference.file or reference.module), *sys.path)
    known = _found.get(key)
    if known is None or known.path.read_bytes() != known.source:
        known = _found[key] = _probed(reference)
    return known


def _check_file(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        near = did_you_mean(path.name, [other.name for other in path.parent.glob("*.py")])
        kind = PluginLoadError if isinstance(error, PermissionError) else PluginNotFoundError
        raise kind(f"{path} cannot be read: {error.strerror}.{near}") from None


def _probed(reference: Reference) -> ProbedFile:
    where = str(reference.file or reference.module)
    with tempfile.TemporaryDirectory(prefix="slime-probe-") as folder:
        answer, output = Path(folder, "answer"), Path(folder, "output")
        # Files, not pipes: a program that the user's file starts may keep a pipe open forever.
        with output.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, json.dumps(sys.path), where, str(answer), str(TIMEOUT_S)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                status = process.wait(TIMEOUT_S + _GRACE_S)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if answer.exists():
            found: ProbedFile | PluginLoadError = pickle.loads(answer.read_bytes())
            if isinstance(found, PluginLoadError):
                raise found
            return found
        printed = output.read_text(encoding="utf-8", errors="replace")
    if status is None or "Timeout (" in printed:
        raise PluginLoadError(
            f"{_hung_at(printed, where)} was still being imported after {TIMEOUT_S:g} s. Move slow work"
            " into the function or class"
        )
    last = "".join(f"; its last output was: {line}" for line in printed.strip().splitlines()[-1:])
    raise PluginLoadError(f"{where} ended the process that imported it, with exit status {status}{last}")


def _hung_at(printed: str, where: str) -> str:
    """FILE:LINE of the user's file in the stack that faulthandler printed."""
    lines = re.findall(r'File "(.+)", line (\d+) in', printed)
    return next((f"{file}:{line}" for file, line in lines if file == where), where)


# --- in the separate process -----------------------------------------------------------------------


def main(where: str, answer: str, timeout_s: str) -> NoReturn:
    """Import what `where` names, write a pickled `ProbedFile` or `PluginLoadError` to `answer`, and exit."""
    faulthandler.dump_traceback_later(float(timeout_s), exit=True)
    Path(f"{answer}.part").write_bytes(pickle.dumps(_import(where)))
    os.replace(f"{answer}.part", answer)
    # Skip threads and exit handlers of the user's file.
    os._exit(0)


def _import(where: str) -> ProbedFile | PluginLoadError:
    by_path = where.endswith(".py")
    try:
        if by_path:
            path = Path(where)
            source = path.read_bytes()
            module = run_file(path, source)
        else:
            module = importlib.import_module(where)
            path = Path(module.__file__ or "")
            source = path.read_bytes()
        return ProbedFile(path, source, tuple(definitions_in(module)))
    except BaseException as error:  # noqa: BLE001 - the boundary around the user's file, sys.exit() included
        return _explained(error, where, by_path=by_path)


def _explained(error: BaseException, where: str, *, by_path: bool) -> PluginLoadError:
    if isinstance(error, SyntaxError):
        return PluginLoadError(f"{error.filename or where}:{error.lineno or 1}: syntax error: {error.msg}")
    line = _lines(error) or where
    if isinstance(error, ModuleNotFoundError) and error.name:
        if not by_path and f"{where}.".startswith(f"{error.name}."):
            file = Path(*where.split(".")).with_suffix(".py")
            hint = f"Did you mean {file}:NAME?" if file.is_file() else "Write a file as FILE.py:NAME."
            return PluginNotFoundError(f"there is no module {where} on the path. {hint}")
        if error.name.startswith("slime."):
            return PluginLoadError(
                f"{line} needs {error.name}, which this slime does not have. If it is THUDM's, docs/migrating.md says"
                " what there is here"
            )
        return PluginLoadError(
            f"{line} needs {error.name}, which is not installed. Install the package that provides it"
        )
    if isinstance(error, ImportError) and "relative import" in str(error):
        return PluginLoadError(
            f"{line}: a relative import in a file that is not part of a package. Write `from MODULE import ...` for a"
            " file in the same folder, or name the function as package.module:NAME"
        )
    verb = "ends the process when it is imported" if isinstance(error, SystemExit) else "cannot be loaded"
    return PluginLoadError(f"{line} {verb}: {one_line(error)}")


def _lines(error: BaseException) -> str:
    """FILE:LINE in the user's code: where its import began and, if that differs, where it failed."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename[:1] != "<"]
    skipped = (__file__, sys.modules[run_file.__module__].__file__, importlib.__file__)
    frames = [one for one in frames if one.filename not in skipped]
    own = [f"{one.filename}:{one.lineno}" for one in frames]
    if len(own) <= 1:
        return "".join(own)
    return f"{own[0]} (at {own[-1]})" if own[0] != own[-1] else own[0]
