"""Digests of prompt files, by which a resumed run recognizes its data."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.prompt_files import numbered, write_rows

from slime.errors import DataError
from slime.kit.readers import prompt_source as content
from slime.kit.readers.prompt_source import content_digest, parse_source


def digest(text: object) -> str:
    return content_digest(parse_source(str(text)))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_the_digest_depends_on_the_content_and_not_on_the_path(kind: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path, kind, numbered(5))
    was = digest(path)
    moved = path.rename(tmp_path / f"moved{path.suffix}")
    assert digest(moved) == was
    assert digest(write_rows(tmp_path, kind, numbered(5, 1))) != was


def test_the_digest_depends_on_the_slice_and_not_on_the_weight(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "jsonl", numbered(5))
    assert len({digest(path), digest(f"{path}@[1:]"), digest(f"{path}@[:1]")}) == 3
    assert digest(f"{path}@[1:]=3") == digest(f"{path}@[1:]")


def test_the_digest_of_a_large_file_depends_on_its_size_and_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "WHOLE", 100)
    monkeypatch.setattr(content, "_PIECE", 10)
    path = tmp_path / "p"
    path.write_bytes(bytes(range(256)) * 40)
    was = digest(path)
    changed = bytearray(path.read_bytes())
    for offset in (0, len(changed) - 1):
        changed[offset] ^= 1
        path.write_bytes(changed)
        assert digest(path) != was
        changed[offset] ^= 1
    path.write_bytes(changed + b"x")
    assert digest(path) != was


def test_an_error_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--prompt-data \S+/no cannot be read: No such file"):
        digest(tmp_path / "no")
