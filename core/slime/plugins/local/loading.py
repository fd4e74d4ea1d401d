"""Loads the file that a reference names, under a name of its own."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from slime.errors import PluginLoadError
from slime.plugins.local.definitions import Function
from slime.plugins.local.parameters import Parameters
from slime.plugins.local.target import Target


@dataclass(frozen=True, slots=True)
class LocalFunction:
    """A loaded function or class, called with those of the offered values that its parameters name."""

    made: Any
    parameters: Parameters
    is_async: bool
    #: for messages: "custom_rm.py:reward_func"
    title: str

    def __call__(self, **offered: Any) -> Any:
        return self.parameters.call(self.made, offered)


def load(target: Target) -> LocalFunction:
    """Run the file and take the function or class out of it.

    Raises `PluginLoadError` where the file raises, has changed since it was read, or binds another thing to the name.
    """
    module = _module(target)
    made = getattr(module, target.name, None)
    if not callable(made):
        raise PluginLoadError(
            f"{target.origin}: {target.name} is {made!r} once {target.source.path} has run, expected what is"
            " defined there"
        )
    definition = target.definition
    # Decorators may hide parameters from Python that the source shows; constructors may be a foreign base class's.
    parameters = definition.parameters if isinstance(definition, Function) else Parameters.of(made)
    return LocalFunction(made, parameters, target.is_async, f"{target.source.path.name}:{target.name}")


def _module(target: Target) -> ModuleType:
    source = target.source
    try:
        if not source.by_path:
            return importlib.import_module(source.module)
        return _run(source.path, source.content, source.sha256)
    except PluginLoadError:
        raise
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise PluginLoadError(
            f"{source.path}{_line_of(error, source.path)} cannot be loaded:"
            f" {type(error).__name__}{f': {text}' if text else ''}"
        ) from error


def _run(path: Path, content: bytes, sha256: str) -> ModuleType:
    """The module of a file, run once in a process for each content that it had."""
    place = hashlib.sha256(str(path).encode()).hexdigest()
    name = f"slime_local_{path.stem}_{place[:8]}_{sha256[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise PluginLoadError(f"{path} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    # What runs is what was read and hashed: never a stale cache, never a later edit.
    code = compile(content, str(path), "exec", dont_inherit=True)
    sys.modules[name] = module
    try:
        with neighbours_importable(path.parent):
            exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def neighbours_importable(folder: Path) -> Iterator[None]:
    """Let files of `folder` be imported by their bare names, for these imports only.

    Afterwards neither the folder nor the names are there any more, so that two folders may each have their
    `helpers.py`; whoever imported one keeps it.  A folder that is on Python's path already is left as it is.
    """
    if any(os.path.abspath(entry or os.curdir) == str(folder) for entry in sys.path):
        yield
        return
    names = {_module_name(path) for path in folder.iterdir()} - {None} - sys.stdlib_module_names
    # What came from this folder by another way is the same file: it must not exist twice.
    names = {name for name in names if not _loaded_from(name, folder)}
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in names}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] in names]:
            del sys.modules[name]
        sys.modules.update(hidden)


def _module_name(path: Path) -> str | None:
    """The name under which a file or folder can be imported."""
    if path.suffix == ".py":
        return path.stem
    return path.name if (path / "__init__.py").is_file() else None


def _loaded_from(name: str | None, folder: Path) -> bool:
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    return file is not None and Path(file).is_relative_to(folder)


def _line_of(error: BaseException, path: Path) -> str:
    """`:LINE` of the file's own statement that failed."""
    line = ""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = f":{trace.tb_lineno}"
        trace = trace.tb_next
    return line
