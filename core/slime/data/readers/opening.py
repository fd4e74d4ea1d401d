"""Which reader a prompt file needs, told by what is in it."""

from __future__ import annotations

from pathlib import Path

from slime.data.prompt_source import HUB, PromptSource
from slime.data.readers.hugging_face import open_hugging_face
from slime.data.readers.json_lines import JsonLines
from slime.data.readers.parquet import RowGroups, unpack_parquet
from slime.data.readers.reader import Reader
from slime.data.readers.unpacked import unpack_gzip
from slime.data.rows import Columns
from slime.errors import DataError

_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
#: what files begin with that are packed in a way that slime does not read
_PACKED = {b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
EXPECTED = "expected JSON lines (also with gzip), Parquet, or the folder of a data set"


def open_reader(
    source: PromptSource, columns: Columns, *, by_block: bool = False, most_unpacked: int | None = None
) -> Reader:
    """The reader of a source, cut to its slice.

    by_block        only blocks are read, in constant memory: what would have to be unpacked for its rows is not
    most_unpacked   bytes of a gzip file's content that are enough

    Raises `DataError` for what is missing, unreadable, of no known format or empty, and for missing columns.
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
            _refuse_binary(path, begin)
            # A slice may lie anywhere.
            most = None if source.sliced else most_unpacked
            unpacked = unpack_gzip(path, most) if begin.startswith(_GZIP) else None
            reader = JsonLines(name, str(path) if unpacked is None else unpacked.path, columns, unpacked)
            reader.incomplete = unpacked is not None and most is not None and unpacked.size >= most
    try:
        if reader.rows_about() == (0, True):
            raise DataError(f"{source.path} has no rows, expected one JSON object per line")
        if source.sliced:
            reader.cut(source)
    except BaseException:
        reader.close()
        raise
    return reader


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4096)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist, {EXPECTED}{_as_name(path)}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _as_name(path: Path) -> str:
    """A hint for those who name a data set as other tools do."""
    named = not path.is_absolute() and len(path.parts) == 2 and not path.suffix and path.parts[0] not in (".", "..")
    return f". A data set of the Hugging Face Hub is {HUB}{path}" if named else ""


def _refuse_binary(path: Path, begin: bytes) -> None:
    packed = next((kind for magic, kind in _PACKED.items() if begin.startswith(magic)), None)
    if packed is not None:
        raise DataError(f"{path} is a {packed} file, {EXPECTED}: unpack it first")
    if path.suffix == ".parquet":
        raise DataError(f"{path} is no Parquet file that can be read: it does not begin like one")
    if begin.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is text in UTF-16, expected UTF-8: save it anew")
    if b"\0" in begin and not begin.startswith(_GZIP):
        raise DataError(f"{path} is a binary file, {EXPECTED}")
