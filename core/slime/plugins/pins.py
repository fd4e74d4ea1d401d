"""Which code the installed plugin packages have, one line each, so that two installations can be compared."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slime.errors import ConfigError
from slime.plugins.find import FoundPlugin, canonical
from slime.plugins.provenance import source_of

_LINE = re.compile(
    r"(?P<requirement>[^#]+?)\s+#\s+(?P<distribution>\S+) (?P<version>\S+)"
    r"(?: commit=(?P<commit>\S+))?(?P<dirty> modified)?(?: sha256=(?P<sha256>[0-9a-f]{64}))?"
)


@dataclass(frozen=True, slots=True)
class Pin:
    """One installed package."""

    distribution: str
    version: str
    #: how pip would install the same again
    requirement: str
    #: of the installed files as they are on disk; None where they are elsewhere (editable installs)
    sha256: str | None = None
    commit: str | None = None
    #: whether tracked files of an editable install differ from the commit
    dirty: bool = False

    @property
    def line(self) -> str:
        """A line of a pip requirements file; what pip cannot express is in its comment."""
        facts = [self.distribution, self.version]
        facts += [f"commit={self.commit}"] if self.commit else []
        facts += ["modified"] if self.dirty else []
        facts += [f"sha256={self.sha256}"] if self.sha256 else []
        return f"{self.requirement}  # {' '.join(facts)}"

    @classmethod
    def read(cls, line: str) -> Pin:
        """The pin that `line` states.  Raises `ConfigError`."""
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ConfigError(f"{line.strip()!r} is no pin; expected a line that `slime plugins --freeze` printed")
        stated = match.groupdict()
        return cls(
            stated["distribution"],
            stated["version"],
            stated["requirement"],
            stated["sha256"],
            stated["commit"],
            dirty=stated["dirty"] is not None,
        )

    def compared(self, other: Pin) -> Iterator[tuple[str, str, str]]:
        """(what differs, ours, theirs)."""
        columns = {
            "version": (self.version, other.version),
            "commit": (self.commit or "none", other.commit or "none"),
            "working tree": ("modified" if self.dirty else "clean", "modified" if other.dirty else "clean"),
            "files": (self.sha256 or "not hashed", other.sha256 or "not hashed"),
        }
        yield from ((what, ours, theirs) for what, (ours, theirs) in columns.items() if ours != theirs)


def pins_of(plugins: Iterable[FoundPlugin]) -> list[Pin]:
    """A pin of every package that has one of `plugins`, by name.  Runs no plugin's code."""
    by_package = {canonical(found.distribution): found for found in plugins}
    return [_pin(by_package[name]) for name in sorted(by_package)]


def _pin(found: FoundPlugin) -> Pin:
    source = source_of(found)
    url, commit = source.get("url"), source.get("commit")
    name = found.distribution
    if source["editable"]:
        return Pin(name, found.version, f"-e {url}", None, commit, dirty=bool(source.get("dirty")))
    if url is None:
        requirement = f"{name}=={found.version}"
    elif commit is not None:
        requirement = f"{name} @ git+{url}@{commit}"
    else:
        requirement = f"{name} @ {url}"
    return Pin(name, found.version, requirement, _hash_of_files(found), commit)


def _hash_of_files(found: FoundPlugin) -> str | None:
    """Over names and contents of the files that pip installed, as they are on disk now; None where none are listed.

    Left out is what differs between installations of one wheel: scripts, byte code, and pip's own notes.
    """
    total = hashlib.sha256()
    files = 0
    for file in sorted(found.entry_point.dist.files or [] if found.entry_point.dist else [], key=str):
        name = str(file)
        noted = ".dist-info/" in name and not name.endswith("/entry_points.txt")
        if name.startswith("..") or noted or name.endswith(".pyc"):
            continue
        path = Path(str(file.locate()))
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
        total.update(f"{name} {content}\n".encode())
        files += 1
    return total.hexdigest() if files else None
