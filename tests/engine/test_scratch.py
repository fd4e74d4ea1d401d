"""The temporary folders of engines."""

from __future__ import annotations

import multiprocessing
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.engine.scratch import Scratch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def shared() -> Iterator[Path]:
    """What an engine has in shared memory."""
    path = Path(f"/dev/shm/sglang_loads_test-{uuid.uuid4().hex}.shm")
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def use_and_die(folder: str, names: list[Path]) -> None:
    tempfile.tempdir = folder
    Scratch().remember(names)
    # The process ends without a clean-up.


def killed(folder: Path, *names: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=use_and_die, args=(str(folder), names))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_an_engine_removes_what_killed_ones_left_and_nothing_else(folder: Path, shared: Path) -> None:
    in_use = Scratch()
    foreign, just_made = folder / "precious", folder / "slime-engine-new"
    foreign.touch()
    just_made.mkdir()
    killed(folder, shared, foreign)
    assert len(list(folder.iterdir())) == 4 and shared.exists()
    made = Scratch()
    assert not shared.exists() and foreign.exists(), "only names of SGLang's are removed"
    assert set(folder.iterdir()) == {in_use.path, made.path, foreign, just_made}
    for one in (in_use, made):
        assert one.path.stat().st_mode & 0o077 == 0, "others can enter it"
        one.cleanup()
    assert set(folder.iterdir()) == {foreign, just_made}
