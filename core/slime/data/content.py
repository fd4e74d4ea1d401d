"""What a prompt file holds, in one short text: by which a resumed run knows it again wherever it lies."""

from __future__ import annotations

import hashlib
from pathlib import Path

from slime.data.prompt_source import HUB, PromptSource
from slime.errors import DataError

#: files up to this size are read whole
WHOLE = 256 * 2**20
#: of larger ones this many pieces of this many bytes, evenly spaced
_PIECES, _PIECE = 64, 2**20


def content_digest(source: PromptSource) -> str:
    """Hexadecimal sha256 of a source's content and of the slice that is used.

    Of a file larger than 256 MiB its size and 64 MiB in evenly spaced pieces count; of a folder its files and their
    names; of a data set of the Hub its name.  Raises `DataError` for what cannot be read.
    """
    if source.path.startswith(HUB):
        return hashlib.sha256(str(source).encode()).hexdigest()
    path = Path(source.path)
    folder = Path(source.path.partition("?")[0])
    try:
        digest = _folder(folder) if folder.is_dir() and not path.is_file() else _file(path)
    except OSError as error:
        raise DataError(f"--prompt-data {source.path} cannot be read: {error.strerror}") from error
    if not source.sliced:
        return digest
    return hashlib.sha256(f"{digest} {source.start}:{source.stop}".encode()).hexdigest()


def _folder(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(one for one in folder.rglob("*") if one.is_file() and not one.name.startswith("cache-")):
        digest.update(f"{path.relative_to(folder)} {_file(path)}\n".encode())
    return digest.hexdigest()


def _file(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(f"{size}".encode())
        for piece in range(_PIECES):
            file.seek((size - _PIECE) * piece // (_PIECES - 1))
            digest.update(file.read(_PIECE))
        return digest.hexdigest()
