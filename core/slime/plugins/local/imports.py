"""Can a file's imports succeed?  Told from its source text."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator

from slime.errors import PluginLoadError
from slime.plugins.local.source import Source, in_folders


def check_imports(source: Source) -> None:
    """Raise `PluginLoadError` for an import that cannot work: a package that is not installed, or, in a file that is
    loaded by its path, a relative import or one of a neighbouring file from inside a function.

    Imports under `if` and `try` are the file's own business.
    """
    for statement in source.tree.body:
        for top in _tops(statement):
            if not _is_there(top) and not (source.by_path and _beside(source, top)):
                raise PluginLoadError(
                    f"{source.path}:{statement.lineno} needs {top}, which is not installed."
                    " Install the package that provides it"
                )
    if not source.by_path:
        return
    at_top = set(map(id, source.statements()))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise PluginLoadError(
                f"{source.path}:{node.lineno}: a relative import, in a file that is no part of a package. Write"
                f" `from {node.module or 'MODULE'} import ...` for a file beside it, or name it as package.module.NAME"
            )
        if id(node) in at_top:
            continue
        for top in _tops(node):
            if _beside(source, top) and not _is_there(top):
                raise PluginLoadError(
                    f"{source.path}:{getattr(node, 'lineno', 1)} imports {top}.py inside a function. Files beside it"
                    " can be imported while it is loaded only: import at the top of the file"
                )


def _tops(node: ast.AST) -> Iterator[str]:
    """Top-level packages that an import names."""
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.split(".")[0]


def _is_there(top: str) -> bool:
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return top == "__main__"


def _beside(source: Source, top: str) -> bool:
    folder = source.path.parent
    return in_folders([folder], [top]) is not None or (folder / top).is_dir()
