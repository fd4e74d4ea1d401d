"""Unnamed temporary files: they disappear when closed, and when the process ends, however it ends."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from slime.errors import DataError

_PIECE = 1 << 20


class Unpacked:
    """The content of a file in another format, in a temporary file."""

    def __init__(self, write: Callable[[BinaryIO], None], source: str) -> None:
        """Initialize.

        Args:
            write: Fills the file.
            source: Name of the original, for messages.

        Raises:
            DataError: The disk is full.
        """
        self._file = tempfile.TemporaryFile(prefix="slime-prompts-")  # noqa: SIM115 - open as long as this object lives
        try:
            write(self._file)
            self._file.flush()
        except OSError as error:
            self._file.close()
            raise DataError(
                f"{source} cannot be unpacked into {tempfile.gettempdir()}: {error.strerror}. Set TMPDIR to"
                " another folder"
            ) from None
        except BaseException:
            self._file.close()
            raise

    @property
    def path(self) -> str:
        """A path by which this process and its children can open it until it is closed."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    @property
    def size(self) -> int:
        """Size in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Free the space."""
        self._file.close()


def unpack_gzip(path: Path, most: int | None = None) -> Unpacked:
    """Unpack a gzip file, or its first `most` bytes and at most as many up to the end of a line.

    Raises:
        DataError: The file is damaged or truncated.
    """

    def write(target: BinaryIO) -> None:
        with _gzip(path) as source:
            if most is None:
                shutil.copyfileobj(source, target, _PIECE)
            else:
                target.write(source.read(most))
                target.write(source.readline(most))

    return Unpacked(write, str(path))


def gzip_beginning(path: Path, size: int) -> bytes:
    """The first `size` unpacked bytes of a gzip file. Raises `DataError` if it is damaged or truncated there."""
    with _gzip(path) as source:
        return source.read(size)


@contextmanager
def _gzip(path: Path) -> Iterator[BinaryIO]:
    """A gzip file whose damage becomes a `DataError`."""
    try:
        with gzip.open(path, "rb") as source:
            yield cast(BinaryIO, source)
    except EOFError:
        raise DataError(f"{path} is a gzip file that ends too early: it is truncated. Copy it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is a damaged gzip file: {error}") from None
