"""Where code comes from: a package's source, and the line that defines a class.  Nothing is imported for it."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlparse

from slime.plugins import Component
from slime.plugins.find import FoundPlugin
from slime.plugins.provenance import source_of


def describe_source(found: FoundPlugin) -> str:
    """`index`, `editable /folder, commit 1a2b3c4d, modified`, or the address it was installed from."""
    source = source_of(found)
    url = source.get("url")
    if url is None:
        return "package index"
    place = unquote(urlparse(url).path) if url.startswith("file:") else url
    parts = [f"editable {place}" if source["editable"] else place]
    if source.get("commit"):
        parts.append(f"commit {source['commit'][:12]}")
    if source.get("dirty"):
        parts.append("modified")
    return ", ".join(parts)


def class_line(component: Component) -> str | None:
    """`FILE:LINE` of the class that a spec names; None where its module is not Python source."""
    module, _, name = component.spec.factory.partition(":")
    found = find_spec(module)
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return None
    try:
        body: list[ast.stmt] = ast.parse(Path(found.origin).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return found.origin
    line = 0
    for part in name.split("."):
        defined = next((node for node in body if getattr(node, "name", None) == part), None)
        if not isinstance(defined, ast.ClassDef | ast.FunctionDef):
            break
        line, body = defined.lineno, defined.body
    return f"{found.origin}:{line}" if line else found.origin
