"""Packages that are not there, for a whole tree of processes: Python imports this at the start of each of them.

The packages named in `WITHOUT_SHOPS` cannot be imported, and their entry points are gone, as if they were not
installed.
"""

import functools
import importlib.abc
import importlib.metadata
import os
import sys

HIDDEN = frozenset(os.environ.get("WITHOUT_SHOPS", "").split())


class Missing(importlib.abc.MetaPathFinder):
    """Finds none of the hidden packages, and keeps others from finding them."""

    def find_spec(self, name, *_):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hide_entry_points(distribution):
    """Leave the entry points of hidden packages out of a distribution's."""
    entry_points = distribution.entry_points.fget

    @functools.wraps(entry_points)
    def left(self):
        found = entry_points(self)
        return type(found)(entry for entry in found if entry.value.partition(":")[0].partition(".")[0] not in HIDDEN)

    distribution.entry_points = property(left)


if HIDDEN:
    sys.meta_path.insert(0, Missing())
    hide_entry_points(importlib.metadata.Distribution)
    import importlib_metadata

    hide_entry_points(importlib_metadata.Distribution)
