"""Functions of the user's own that options name: tools and agents."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load_function(reference: str) -> Callable[..., Any]:
    """What `package.module:function` or `FILE.py:function` names.

    A file is loaded once in a process; files beside it can be imported.  Raises `ValueError`, with the reference, where
    there is no such function, or its module cannot be loaded.
    """
    where, _, name = reference.rpartition(":")
    if not where or not name:
        raise ValueError(f"{reference!r}: expected package.module:function or FILE.py:function")
    try:
        module = _load_file(Path(where).absolute()) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as error:  # the boundary around the user's module
        raise ValueError(f"{reference!r} cannot be loaded: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        raise ValueError(f"{reference!r}: {where} has no function {name!r}")
    if not callable(function):
        raise ValueError(f"{reference!r} is a {type(function).__name__}, expected a function")
    return function  # type: ignore[no-any-return]  # its types are the user's own


def _load_file(path: Path) -> ModuleType:
    name = f"slime_function_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for the files beside it, also those that it imports later
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
