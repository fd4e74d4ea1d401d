"""Temporary files that have no name: gone when they are closed, or when the process ends in whatever way."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from slime.errors import DataError

_PIECE = 1 << 20


class Unpacked:
    """A file's content in another form, on disk."""

    def __init__(self, write: Callable[[BinaryIO], None], source: str) -> None:
        """Let `write` fill it.  Raises `DataError` where there is no room for what `source` holds."""
        self._file = tempfile.TemporaryFile(prefix="slime-prompts-")  # noqa: SIM115 - open as long as this object lives
        try:
            write(self._file)
            self._file.flush()
        except OSError as error:
            self._file.close()
            if isinstance(error, gzip.BadGzipFile):
                raise
            raise DataError(
                f"{source} cannot be unpacked into {tempfile.gettempdir()}: {error.strerror}. TMPDIR names another"
                " folder"
            ) from None
        except BaseException:
            self._file.close()
            raise

    @property
    def path(self) -> str:
        """By which this process and its children open it while it is not closed."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    @property
    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Give the space back."""
        self._file.close()


def unpack_gzip(path: Path, most: int | None = None) -> Unpacked:
    """The content of a gzip file, at most its first `most` bytes and what is left of their last line.

    Raises `DataError` for one that is damaged or cut off.
    """

    def write(target: BinaryIO) -> None:
        with _gzip_errors(path), gzip.open(path, "rb") as source:
            if most is None:
                shutil.copyfileobj(source, target, _PIECE)
            else:
                target.write(source.read(most))
                target.write(source.readline())

    return Unpacked(write, str(path))


@contextmanager
def _gzip_errors(path: Path) -> Iterator[None]:
    """What a damaged gzip file raises, as `DataError`."""
    try:
        yield
    except EOFError:
        raise DataError(f"{path} is a gzip file that ends too early: it was cut off. Copy it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is a damaged gzip file: {error}") from None
