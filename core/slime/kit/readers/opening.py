"""Chooses the reader for a prompt file from the file's content."""

from __future__ import annotations

import stat
from pathlib import Path

from slime.errors import DataError
from slime.kit.readers.hugging_face import open_hugging_face
from slime.kit.readers.json_lines import JsonLines
from slime.kit.readers.parquet import RowGroups, unpack_parquet
from slime.kit.readers.prompt_source import HUB, PromptSource
from slime.kit.readers.reader import Reader
from slime.kit.readers.rows import Columns
from slime.kit.readers.unpacked import gzip_beginning, unpack_gzip

_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
#: first bytes of archive formats that slime does not read
_PACKED = {b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
EXPECTED = "expected JSON lines (also with gzip), Parquet, or the folder of a data set"
#: ends of names of other formats -> how to convert one
_TABLES = {".csv": "", ".tsv": ", sep='\\t'"}


def open_reader(
    source: PromptSource, columns: Columns, *, by_block: bool = False, most_unpacked: int | None = None
) -> Reader:
    """Open a source, restricted to its slice.

    Args:
        source: The file, folder or data set.
        columns: The keys to read.
        by_block: Only blocks are going to be read. Parquet is then not unpacked for random access.
        most_unpacked: Unpack at most about this many bytes of a gzip file.

    Raises:
        DataError: The source is missing, unreadable, empty, of an unknown format, or lacks a column.
    """
    name, path = str(source), Path(source.path)
    folder = Path(source.path.partition("?")[0])
    if source.path.startswith(HUB) or folder.is_dir():
        reader: Reader = open_hugging_face(name, source.path, columns)
    else:
        begin = _first_bytes(path)
        if begin.startswith(_PARQUET):
            reader = (RowGroups if by_block else unpack_parquet)(name, str(path), columns)
        else:
            packed = begin.startswith(_GZIP)
            _refuse_other(path, gzip_beginning(path, len(begin)) if packed else begin)
            # A slice can be anywhere in the file.
            most = None if source.sliced else most_unpacked
            unpacked = unpack_gzip(path, most) if packed else None
            reader = JsonLines(name, str(path) if unpacked is None else unpacked.path, columns, unpacked)
            reader.incomplete = unpacked is not None and most is not None and unpacked.size >= most
    try:
        if reader.rows == 0 or (reader.rows is None and next(reader.scan(), None) is None):
            raise DataError(f"{source.path} has no rows, expected one JSON object per line")
        if source.sliced:
            reader.cut(source)
    except BaseException:
        reader.close()
        raise
    return reader


def _first_bytes(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            # Reading a pipe would wait for its writer, and its rows could be read only once.
            raise DataError(f"{path} is a pipe, a device or a socket, {EXPECTED}: write the rows to a file")
        with path.open("rb") as file:
            return file.read(4096)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist, {EXPECTED}{_as_name(path)}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _as_name(path: Path) -> str:
    """A hint for users who wrote NAME/NAME, as other tools accept it."""
    named = not path.is_absolute() and len(path.parts) == 2 and not path.suffix and path.parts[0] not in (".", "..")
    return f". A data set of the Hugging Face Hub is {HUB}{path}" if named else ""


def _refuse_other(path: Path, begin: bytes) -> None:
    """Refuse what is not text in lines of JSON, by its first bytes (of a gzip file, after unpacking)."""
    packed = next((kind for magic, kind in _PACKED.items() if begin.startswith(magic)), None)
    if packed is not None:
        raise DataError(f"{path} is a {packed} file, {EXPECTED}: unpack it first")
    if path.suffix == ".parquet":
        raise DataError(f"{path} is not a valid Parquet file: its first bytes are wrong")
    if begin.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is text in UTF-16, expected UTF-8: convert it")
    if b"\0" in begin or begin.startswith(_GZIP):
        raise DataError(f"{path} is a binary file, {EXPECTED}")
    separator = _TABLES.get(Path(path.name.removesuffix(".gz")).suffix.lower())
    if separator is not None and not begin.lstrip().startswith(b"{"):
        raise DataError(
            f'{path} is a table as text, {EXPECTED}. Convert it: python -c "import pandas;'
            f" pandas.read_csv('{path}'{separator}).to_json('{path.stem}.jsonl', orient='records', lines=True)\""
        )
