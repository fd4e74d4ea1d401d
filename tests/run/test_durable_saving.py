"""What a checkpoint is made of is on disk before it has its name, and its name before `latest` has it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.run.test_checkpoint_damage import commit, writer_for

from slime.errors import CheckpointError
from slime.run.checkpoint.files import record_files, sync_folder
from slime.run.checkpoint.read import read_checkpoint


class RecordingDisk:
    """A stand-in that records, in their order, what is flushed, renamed and deleted; it then happens as always."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        #: ("file", path at that time, bytes), ("folder", path), ("rename", from, to), ("delete", path)
        self.events: list[tuple[str | int, ...]] = []
        fsync, rename, replace, rmtree = os.fsync, Path.rename, Path.replace, shutil.rmtree

        def record_fsync(handle: int) -> None:
            path, status = os.readlink(f"/proc/self/fd/{handle}"), os.fstat(handle)
            is_folder = stat.S_ISDIR(status.st_mode)
            self.events.append(("folder", path) if is_folder else ("file", path, status.st_size))
            fsync(handle)

        def recorded(change: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
            def made(path: Path, target: Path) -> Path:
                self.events.append(("rename", str(path), str(target)))
                return change(path, target)

            return made

        def record_rmtree(path: Path, ignore_errors: bool) -> None:
            if path.exists():
                self.events.append(("delete", str(path)))
            rmtree(path, ignore_errors=ignore_errors)

        monkeypatch.setattr(os, "fsync", record_fsync)
        monkeypatch.setattr(Path, "rename", recorded(rename))
        monkeypatch.setattr(Path, "replace", recorded(replace))
        monkeypatch.setattr(shutil, "rmtree", record_rmtree)

    def at(self, *event: str | int) -> int:
        """When the event happened."""
        return self.events.index(event)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> RecordingDisk:
    return RecordingDisk(monkeypatch)


def write(root: Path) -> Path:
    """A checkpoint after 2 rollouts, of which one file comes from a rank and nothing has been flushed."""
    writer = writer_for(root)
    temporary = writer.begin(2)
    (temporary / "megatron" / "reference").mkdir()
    (temporary / "megatron" / "reference" / "__0_0.distcp").write_bytes(b"of a rank")
    (temporary / "rollout").mkdir()
    (temporary / "rollout" / "groups.jsonl").write_bytes(b"{}")
    of_rank = record_files(temporary, [temporary / "megatron" / "reference" / "__0_0.distcp"])
    path = writer.commit(temporary, of_rank, rollouts_done=2, weight_version=1, trained_at={1: 0})
    writer.close()
    return path


def test_everything_is_flushed_before_its_name_and_its_name_before_latest(disk: RecordingDisk, tmp_path: Path) -> None:
    root = tmp_path / "new" / "saved"
    (tmp_path / "new").mkdir()
    final = write(root)
    temporary = root / ".rollout_000002.partial"
    renamed = disk.at("rename", str(temporary), str(final))
    files = [path for path in final.rglob("*") if path.is_file()]
    assert len(files) == 5
    for path in files:
        flushed = disk.at("file", str(temporary / path.relative_to(final)), path.stat().st_size)
        assert flushed < renamed, path
        folder = temporary / path.relative_to(final).parent
        last = max(index for index, event in enumerate(disk.events) if event == ("folder", str(folder)))
        assert flushed < last < renamed, "the name of a file is in its folder"
    pointed = disk.at("rename", str(root / ".latest.partial"), str(root / "latest"))
    of_root = [index for index, event in enumerate(disk.events) if event == ("folder", str(root))]
    assert any(renamed < index < pointed for index in of_root) and of_root[-1] > pointed
    assert disk.at("file", str(root / ".latest.partial"), len("rollout_000002\n")) < pointed
    assert disk.at("folder", str(root.parent)) < renamed, "the name of a new --save folder"


def test_a_replaced_checkpoint_is_deleted_once_the_names_of_the_new_one_are_on_disk(
    disk: RecordingDisk, tmp_path: Path
) -> None:
    root = tmp_path / "saved"
    write(root)
    disk.events.clear()
    write(root)
    deleted = disk.at("delete", str(root / ".rollout_000002.replaced"))
    pointed = disk.at("rename", str(root / ".latest.partial"), str(root / "latest"))
    assert any(event == ("folder", str(root)) for event in disk.events[pointed:deleted])


def test_a_checkpoint_that_is_no_longer_kept_loses_its_name_on_disk_before_its_files(
    disk: RecordingDisk, tmp_path: Path
) -> None:
    root = tmp_path / "saved"
    write(root)
    writer = writer_for(root)
    commit(writer, writer.begin(4), 4)
    disk.events.clear()
    writer.delete([2])
    writer.close()
    partial = str(root / ".rollout_000002.partial")
    assert disk.events == [
        ("rename", str(root / "rollout_000002"), partial),
        ("folder", str(root)),
        ("delete", partial),
    ]


@pytest.mark.parametrize("refused", ["file", "folder"])
def test_a_disk_that_cannot_keep_the_bytes_fails_the_save(
    refused: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stand-in whose fsync reports a lost write, as that of a failing disk does."""
    root, fsync = tmp_path / "saved", os.fsync
    write(root)
    writer = writer_for(root)
    temporary = writer.begin(4)

    def failing(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode) == (refused == "folder"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CheckpointError, match=r"could not be written.*Input/output error"):
        commit(writer, temporary, 4)
    assert read_checkpoint(root).rollouts_done == 2 and not (root / "rollout_000004").exists()


def test_a_file_system_that_cannot_flush_folders_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in that answers as some network file systems do."""

    def refuse(_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse)
    sync_folder(tmp_path)
