"""Files as pieces of limited size with their sums, and back: how packages get to a machine without a network.

    python pieces.py FOLDER TARGET

Checks the pieces in FOLDER and puts the files that they hold into TARGET. What is there already is kept. This file
needs only Python itself, since `make gpu-bundle` lays a copy of it beside the pieces.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = "manifest.json"
#: all checked-in files, as `git archive` writes them; unpacked as the folder `source`
SOURCE = "source.tar.gz"
_PREFIX = "piece-"
_BLOCK = 2**20


class BundleError(Exception):
    """Pieces that do not make a bundle; a line for each fault."""


@dataclass(frozen=True)
class Part:
    """A piece, or a file in the bundle.

    Attributes:
        name: Of a file: its path in the target.
        size: In bytes.
        sha256: Of its bytes.
    """

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a bundle holds. The bytes of the pieces, in order, are the bytes of the files, in order.

    Attributes:
        about: What the bundle was made for.
        files: The files.
        pieces: The pieces.
    """

    about: Mapping[str, str]
    files: Sequence[Part]
    pieces: Sequence[Part]


def cut(files: Mapping[str, Path], folder: Path, *, limit: int, about: Mapping[str, str]) -> tuple[Manifest, int]:
    """Write pieces and manifest; a piece that is there with the right bytes stays as it is.

    Args:
        files: Path in the target -> file.
        folder: Where the pieces go. Pieces of an earlier bundle that this one has not are removed.
        limit: Bytes of a piece at most.
        about: For the manifest.

    Returns:
        The manifest, and how many pieces were written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sums = {name: hashlib.sha256() for name in files}
    sizes = dict.fromkeys(files, 0)
    pieces: list[Part] = []
    written = 0
    waiting = bytearray()

    def close() -> None:
        nonlocal written
        piece = Part(f"{_PREFIX}{len(pieces):04}", len(waiting), hashlib.sha256(waiting).hexdigest())
        pieces.append(piece)
        if not _holds(folder / piece.name, piece):
            _write(folder / piece.name, bytes(waiting))
            written += 1
        waiting.clear()

    for name, path in files.items():
        with path.open("rb") as stream:
            while block := stream.read(min(_BLOCK, limit - len(waiting))):
                sums[name].update(block)
                sizes[name] += len(block)
                waiting += block
                if len(waiting) == limit:
                    close()
    if waiting:
        close()
    listed = [Part(name, sizes[name], sums[name].hexdigest()) for name in files]
    manifest = Manifest(about, listed, pieces)
    for path in folder.glob(f"{_PREFIX}*"):
        if path.name not in {piece.name for piece in pieces}:
            path.unlink()
    _write(folder / MANIFEST, json.dumps(asdict(manifest), indent=1).encode())  # last: an unfinished bundle has none
    return manifest, written


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle.

    Raises:
        BundleError: There is none, or it is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise BundleError(f"{folder}: there is no {MANIFEST}. Give the folder that make gpu-bundle wrote")
    try:
        found = json.loads(path.read_bytes())
        files, pieces = ([Part(**part) for part in found[key]] for key in ("files", "pieces"))
        manifest = Manifest(dict(found["about"]), files, pieces)
        whole = sum(file.size for file in files) == sum(piece.size for piece in pieces)
        if not whole or not all(_inside(file.name) for file in files):
            raise ValueError("sizes or names do not fit")
    except (ValueError, TypeError, KeyError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise BundleError(f"{path} is damaged ({type(error).__name__}: {error}). Copy it again") from None
    return manifest


def faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    """What is wrong with the pieces in a folder: missing, damaged, or there twice."""
    by_sum = {piece.sha256: piece.name for piece in manifest.pieces}
    for piece in manifest.pieces:
        path = folder / piece.name
        if not path.is_file():
            yield f"{piece.name} is missing. Copy it again"
        elif path.stat().st_size != piece.size:
            yield f"{piece.name} is damaged: {path.stat().st_size:,} bytes of {piece.size:,}. Copy it again"
        elif (found := _sum(path)) != piece.sha256:
            what = f"it holds what {by_sum[found]} holds" if found in by_sum else "its sum is another"
            yield f"{piece.name} is damaged: {what}. Copy it again"
    expected = {piece.name for piece in manifest.pieces}
    for path in sorted(folder.glob(f"{_PREFIX}*")):
        if path.name not in expected:
            other = by_sum.get(_sum(path))
            what = f"it is {other} a second time" if other else f"{MANIFEST} does not name it"
            yield f"{path.name} does not belong here: {what}. Delete it"


def join(folder: Path, target: Path) -> Manifest:
    """Check all pieces, then write the files that they hold; those that are there already are kept.

    Raises:
        BundleError: A piece is missing, damaged or there twice, or the disk is too small.
    """
    manifest = read_manifest(folder)
    if found := [*faults(folder, manifest)]:
        raise BundleError("\n".join(found))
    target.mkdir(parents=True, exist_ok=True)
    wanted = [file for file in manifest.files if not _holds(target / file.name, file)]
    needed, free = sum(file.size for file in wanted), shutil.disk_usage(target).free
    if needed > free:
        raise BundleError(f"{target}: {free / 1e9:.1f} GB are free, and the files take {needed / 1e9:.1f} GB")
    begin = 0
    for file in manifest.files:
        if file in wanted:
            path = target / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, _range(folder, manifest.pieces, begin, begin + file.size))
        begin += file.size
    shutil.copyfile(folder / MANIFEST, target / MANIFEST)
    return manifest


def unpack(folder: Path, target: Path) -> Manifest:
    """As `join`; then the checked-in files are laid out in the folder `source`, anew each time.

    Raises:
        BundleError: As `join`.
    """
    manifest = join(folder, target)
    if (target / SOURCE).is_file():
        shutil.rmtree(target / "source", ignore_errors=True)
        # Python 3.11 has filters from 3.11.4 on.
        safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        with tarfile.open(target / SOURCE) as archive:
            archive.extractall(target / "source", **safe)
    return manifest


def _range(folder: Path, pieces: Sequence[Part], begin: int, end: int) -> Iterator[bytes]:
    """The bytes from `begin` to `end` of all pieces one after the other."""
    start = 0
    for piece in pieces:
        if start < end and begin < start + piece.size:
            with (folder / piece.name).open("rb") as stream:
                stream.seek(max(0, begin - start))
                left = min(end, start + piece.size) - max(begin, start)
                while left:
                    block = stream.read(min(_BLOCK, left))
                    left -= len(block)
                    yield block
        start += piece.size


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _holds(path: Path, part: Part) -> bool:
    return path.is_file() and path.stat().st_size == part.size and _sum(path) == part.sha256


def _sum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write(path: Path, content: bytes | Iterator[bytes]) -> None:
    """Under another name first, so that what has the name is whole."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("wb") as stream:
        for block in [content] if isinstance(content, bytes) else content:
            stream.write(block)
    unfinished.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if the pieces are not whole."""
    parser: Any = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the pieces are")
    parser.add_argument("target", type=Path, help="where the files go")
    options = parser.parse_args(argv)
    try:
        manifest = unpack(options.folder, options.target)
    except BundleError as error:
        print(f"cannot unpack {options.folder}:\n{error}", file=sys.stderr)
        return 1
    print(f"{len(manifest.pieces)} pieces are whole; {len(manifest.files)} files are in {options.target}")
    print("; ".join(f"{name}: {value}" for name, value in manifest.about.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
