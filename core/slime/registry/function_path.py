"""References to a user's own functions and classes: `FILE.py:NAME` and `package.module:NAME`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from slime.errors import ConfigError, PluginLoadError
from slime.errors.raised import report
from slime.registry.original_names import instead_of

_FILE = re.compile(r"(?P<path>.+\.py)(:(?P<name>[A-Za-z_]\w*))?", re.DOTALL)
_MODULE = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)")
_DOTTED = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)\.(?P<name>[A-Za-z_]\w*)")


def is_reference(name: str) -> bool:
    """Whether a name is a reference and not the name of an installed component, which has neither `:` nor `.py`."""
    return ":" in name or name.endswith(".py")


@dataclass(frozen=True, slots=True)
class Reference:
    """`FILE.py`, `FILE.py:NAME` or `package.module:NAME`."""

    #: absolute; None for a module
    file: Path | None
    #: dotted name; empty for a file
    module: str
    #: None if it is to be chosen from what the file defines
    name: str | None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Read a reference. A relative file is relative to the working directory.

        Raises:
            ConfigError: The text is not a reference.
        """
        # Files first: `my_reward.py:score` would also read as an attribute of a module called `my_reward.py`.
        if match := _FILE.fullmatch(text):
            # abspath, not resolve: the path keeps the symbolic links that the user wrote.
            return cls(Path(os.path.abspath(match["path"])), "", match["name"])
        if match := _MODULE.fullmatch(text):
            return cls(None, match["module"], match["name"])
        hint = ""
        if (instead := instead_of("paths", text.replace(":", "."))) is not None:
            raise ConfigError(f"got {text!r}, a name of THUDM's slime. Here: {instead}. (docs/migrating.md)")
        if Path(f"{text}.py").is_file():
            hint = f" Did you mean {text}.py?"
        elif match := _DOTTED.fullmatch(text):
            hint = f" Did you mean {match['module']}:{match['name']}?"
        raise ConfigError(f"got {text!r}, expected FILE.py, FILE.py:NAME or package.module:NAME.{hint}")

    def __str__(self) -> str:
        return f"{self.file or self.module}{f':{self.name}' if self.name else ''}"


@dataclass(frozen=True, slots=True)
class LocalFunction:
    """A function or class of the user's own, as plain data that any process can load.

    It is probed once, by the driver. All processes run the content that was probed, even if the file has changed since.
    """

    #: with a name
    reference: Reference
    path: Path
    sha256: str
    #: content of the file; None for a module, which is imported as Python imports it
    source: bytes | None = field(repr=False)

    @property
    def title(self) -> str:
        """For messages: `custom_rm.py:reward_func`, or the module and the name."""
        where = self.path.name if self.reference.file else self.reference.module
        return f"{where}:{self.reference.name}"

    def load(self) -> Any:
        """The function or class. Its file is run, unless this process has run it before.

        Raises:
            PluginLoadError: The file raises, or no longer defines the name.
        """
        try:
            made = getattr(self._module(), self.reference.name or "", None)
        except PluginLoadError:
            raise
        except BaseException as error:  # the boundary around the user's file
            raise PluginLoadError(report(f"{self.path} cannot be loaded", error)) from error
        if not callable(made):
            raise PluginLoadError(
                f"{self.path}: {self.reference.name} is {made!r}, expected the function or class that was found before"
            )
        return made

    def _module(self) -> ModuleType:
        if self.source is not None:
            return run_file(self.path, self.source)
        new = self.reference.module not in sys.modules
        module = importlib.import_module(self.reference.module)
        file = Path(module.__file__ or "")
        if new and hashlib.sha256(file.read_bytes()).hexdigest() != self.sha256:
            raise PluginLoadError(f"{file} differs from {self.path}, as the run found it when it started")
        return module


def run_file(path: Path, source: bytes) -> ModuleType:
    """The module of a file; each content of the file is run once per process.

    The module has a unique name, so that two files called `reward.py` do not collide, and it can import files in its
    folder. What the file raises is passed on.
    """
    folder = hashlib.sha256(str(path.parent).encode()).hexdigest()
    name = f"slime_local_{path.stem}_{folder[:8]}_{hashlib.sha256(source).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise PluginLoadError(f"{path} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    # Compiled from the given content, so that what runs is what was probed, without a stale cache or a later edit.
    code = compile(source, str(path), "exec", dont_inherit=True)
    sys.modules[name] = module
    try:
        with _neighbours_first(path.parent):
            exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def _neighbours_first(folder: Path) -> Iterator[None]:
    """Let files of `folder` be imported by their bare names, before any other module of that name.

    Modules of other folders keep their names afterwards, so that two folders may each have their `helpers.py`. The
    folder stays at the end of the search path, for imports inside functions.
    """
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    names -= sys.stdlib_module_names
    others = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] in names and not _is_below(folder, module)
    }
    for name in others:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        taken = {name.partition(".")[0] for name in others}
        for name in [name for name in sys.modules if name.partition(".")[0] in taken]:
            del sys.modules[name]
        sys.modules.update(others)


def _is_below(folder: Path, module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).is_relative_to(folder)
