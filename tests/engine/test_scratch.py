"""The temporary folders of engines."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.engine import server
from slime.engine.server import Scratch


@pytest.fixture
def shared() -> Iterator[Path]:
    """What an engine has in shared memory."""
    path = Path(f"/dev/shm/sglang_loads_test-{uuid.uuid4().hex}.shm")
    path.touch()
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the lists; engines of other tests, which run meanwhile, have theirs in /dev/shm."""
    folder = tmp_path / "lists"
    folder.mkdir()
    monkeypatch.setattr(server, "_LISTS", folder)
    return folder


def use_and_die(folder: str, lists: Path, names: list[Path]) -> None:
    tempfile.tempdir, server._LISTS = folder, lists
    Scratch().remember(names)
    # The process ends without a clean-up.


def killed(folder: Path, lists: Path, *names: Path) -> None:
    arguments = (str(folder), lists, names)
    process = multiprocessing.get_context("spawn").Process(target=use_and_die, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_the_lists_are_where_every_run_looks() -> None:
    made = Scratch()
    assert Path("/dev/shm", made.path.name).read_text() == f"{made.path}\n"
    made.cleanup()
    assert not made.path.exists() and not Path("/dev/shm", made.path.name).exists()


@pytest.mark.parametrize("gone", [True, False])
def test_an_engine_removes_what_killed_ones_left_and_nothing_else(
    tmp_path: Path, lists: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """Each run has a folder of its own for temporary files, which vanishes (`gone`) before its lists are read."""
    here, there = tmp_path / "run", tmp_path / "killed run"
    here.mkdir()
    there.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    in_use = Scratch()
    foreign, just_made, broken = tmp_path / "precious", lists / "slime-engine-new", lists / "slime-engine-bad"
    foreign.touch()
    just_made.touch()
    broken.write_bytes(b"\xff\n")
    killed(there, lists, shared, foreign)
    assert not broken.exists(), "the killed engine had found it"
    assert len([*lists.iterdir()]) == 3 and shared.exists() and len([*there.iterdir()]) == 1
    if gone:
        shutil.rmtree(there)
    made = Scratch()
    assert not shared.exists() and foreign.exists(), "only names of SGLang's are removed"
    assert gone or not [*there.iterdir()]
    assert {*here.iterdir()} == {in_use.path, made.path}
    assert {path.name for path in lists.iterdir()} == {in_use.path.name, made.path.name, just_made.name}
    for one in (in_use, made):
        assert one.path.stat().st_mode & 0o077 == 0, "others can enter it"
        one.cleanup()
    assert not [*here.iterdir()] and [*lists.iterdir()] == [just_made]
