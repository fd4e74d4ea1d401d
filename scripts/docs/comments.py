"""An extension of griffe: comments that begin with `#:` are the documentation of the attribute below or beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe


class Comments(griffe.Extension):
    """Reads `#:` comments, which griffe by itself takes for ordinary ones."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Give an attribute without a docstring the text of its comments."""
        if attr.docstring is not None or attr.lineno is None or not isinstance(attr.filepath, Path):
            return
        lines = attr.lines_collection[attr.filepath]
        beside = lines[(attr.endlineno or attr.lineno) - 1].partition("#:")[2].strip()
        above: list[str] = []
        at = attr.lineno - 2
        while at >= 0 and lines[at].strip().startswith("#:"):
            above.insert(0, lines[at].strip().removeprefix("#:").strip())
            at -= 1
        if text := " ".join([*above, *([beside] if beside else [])]):
            attr.docstring = griffe.Docstring(text, parent=attr)
