"""Source files, found and parsed without importing anything."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from slime.errors import PluginLoadError, PluginNotFoundError, did_you_mean


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: Path
    content: bytes = field(repr=False)
    #: whether it is loaded by its path, with its folder importable, and not as a module of a package
    by_path: bool
    #: the module's dotted name; empty for a file loaded by its path
    module: str = ""

    @classmethod
    def read(cls, path: Path, *, by_path: bool, module: str = "") -> Source:
        """Raises `PluginNotFoundError` where there is no such file, `PluginLoadError` where it cannot be read."""
        try:
            return cls(path, path.read_bytes(), by_path, module)
        except IsADirectoryError:
            raise PluginNotFoundError(f"{path} is a folder, expected a Python file") from None
        except FileNotFoundError:
            folder = path.parent
            near = [other.name for other in folder.glob("*.py")] if folder.is_dir() else []
            what = f"there is no file {path}" if folder.is_dir() else f"there is no folder {folder}"
            raise PluginNotFoundError(f"{what}.{did_you_mean(path.name, near)}") from None
        except OSError as error:
            raise PluginLoadError(f"{path} cannot be read: {error.strerror}") from None

    @cached_property
    def sha256(self) -> str:
        """Of the whole file."""
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def tree(self) -> ast.Module:
        """Raises `PluginLoadError` with the line of a syntax error."""
        try:
            return ast.parse(self.content, filename=str(self.path))
        except SyntaxError as error:
            raise PluginLoadError(f"{self.path}:{error.lineno or 1}: syntax error: {error.msg}") from None
        except ValueError as error:
            raise PluginLoadError(f"{self.path} is no Python source: {error}") from None

    def statements(self) -> Iterator[ast.stmt]:
        """The statements that run when the module does, those under `if`, `try` and `with` included."""
        return _flat(self.tree.body)

    def imported(self, module: str, level: int) -> Source | None:
        """The file of a module that this one imports; None where it has no source that can be found."""
        if level:
            package = self.module.split(".")
            package = package if self.path.name == "__init__.py" else package[:-1]
            base = package[: len(package) - level + 1]
            if not self.module or not base:
                return None
            return module_source(".".join([*base, *([module] if module else [])]))
        if self.by_path and (near := in_folders([self.path.parent], module.split("."))) is not None:
            return Source.read(near, by_path=True)
        return module_source(module)


def module_source(dotted: str) -> Source | None:
    """The file of a module on the Python path; None where it is not there or has no source."""
    top, *rest = dotted.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if rest:
        path = in_folders([Path(folder) for folder in spec.submodule_search_locations or ()], rest)
    else:
        path = Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None
    return None if path is None else Source.read(path, by_path=False, module=dotted)


def in_folders(folders: list[Path], parts: list[str]) -> Path | None:
    """The file of the module `parts` below `folders`, as Python would find it."""
    first, *rest = parts
    if rest:
        inner = [folder / first for folder in folders if (folder / first).is_dir()]
        return in_folders(inner, rest) if inner else None
    candidates = (path for folder in folders for path in (folder / first / "__init__.py", folder / f"{first}.py"))
    return next((path for path in candidates if path.is_file()), None)


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for name in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(statement, name, []))
            for handler in getattr(statement, "handlers", []):
                yield from _flat(handler.body)
