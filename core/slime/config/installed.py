"""Source files of installed packages, found and parsed without importing the packages."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from slime.errors import ConfigError


def package_folder(package: str, distribution: str, *parts: str) -> Path:
    """The folder `package/parts...`.  Raises `ConfigError` when the package is not installed or lacks it."""
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(root, *parts)
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"{'/'.join((package, *parts))} is not installed, so its options are unknown. Install {distribution}:"
        ' `make install` does, and on GPUs pip install "slime-rl[gpu]".'
    )


def parse_source(path: Path) -> ast.Module:
    """The syntax tree of a source file.  Raises `ConfigError` when it cannot be read or parsed."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise ConfigError(f"cannot read the options of an installed package from {path}: {error}") from error


@dataclass(frozen=True)
class Declared:
    """One annotated name of a class body."""

    name: str
    annotation: ast.expr
    value: ast.expr | None
    doc: str


def class_named(tree: ast.Module, name: str) -> ast.ClassDef | None:
    """The top-level class `name`."""
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def declarations(body: list[ast.stmt]) -> list[Declared]:
    """`name: annotation = value` statements with the string that follows each, in order."""
    found: list[Declared] = []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        doc = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            doc = " ".join(after.value.value.split())
        found.append(Declared(node.target.id, node.annotation, node.value, doc))
    return found


def enum_members(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """Member names of every enum class of a module."""
    members: dict[str, tuple[str, ...]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
            names = [t.id for s in node.body if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)]
            members[node.name] = tuple(names)
    return members
