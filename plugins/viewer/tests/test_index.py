"""The index: what it holds, how it grows with the run, where it lies, and what damage does to it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path
from stat import S_IMODE

import pytest
from plugins.viewer.tests.making import GROUPS, add_step, make_run, rising, sample_of

from slime.errors import DataError
from slime.observe.metrics import MetricsWriter
from slime.observe.samples import write_failed, write_rollout
from slime.types import Group
from slime_viewer import answers, queries
from slime_viewer import index as module
from slime_viewer.filters import read_filter
from slime_viewer.index import RunIndex, open_index
from slime_viewer.run_files import RunFolder
from slime_viewer.sample_fields import scalars_of

HOSTILE = "<script>alert(1)</script>\x00\x1b[31m\u202e" + "z" * 2**20


def open_run(folder: Path) -> RunIndex:
    index = open_index(RunFolder(folder))
    index.refresh()
    return index


def counted(index: RunIndex, line: str = "") -> int:
    return queries.count(index, read_filter(line))


def test_the_index_grows_with_the_run_and_reads_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    index = open_run(folder)
    assert counted(index) == 27 and index.state().done == index.state().total > 0
    read: list[str] = []
    lines = module.complete_lines
    monkeypatch.setattr(module, "complete_lines", lambda file, *rest: read.append(file.name) or lines(file, *rest))
    assert index.refresh() == 0 and read == []
    writer = MetricsWriter(folder)
    add_step(folder, writer, 2)
    writer.close()
    assert index.refresh() == 12 and counted(index) == 39
    assert [Path(name).name for name in read] == ["000002.jsonl"]
    again = open_run(folder)
    assert counted(again) == 39 and len(read) == 1


def test_a_half_written_last_line_waits_for_its_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    path = folder / "rollouts" / "000000.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    index = open_run(folder)
    assert counted(index, "kind:train") == 11
    with path.open("ab") as file:
        file.write(whole[-20:])
    assert index.refresh() == 1 and counted(index, "kind:train") == 12
    assert queries.find(index, read_filter("kind:train"), limit=99)[-1].key == "000000:11"


def test_a_file_that_is_written_again_replaces_its_samples(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    index = open_run(folder)
    assert counted(index, "step=1 kind:train reward=1") < 12
    writer = MetricsWriter(folder)
    add_step(folder, writer, 1, reward=lambda *_: 1.0)  # as a resumed run does
    writer.close()
    index.refresh()
    assert counted(index, "step=1 kind:train reward=1") == counted(index, "step=1 kind:train") == 12
    assert counted(index, "step=1 kind:train carry") == 12


def test_a_file_that_is_written_again_in_place_replaces_its_samples(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    path = folder / "rollouts" / "000000.jsonl"
    index = open_run(folder)
    # The new file may have the old one's inode, as here, and be longer.
    row = {"group": 7, "prompt": "another", "reward": 0.25}
    before = path.stat()
    path.write_text("".join(json.dumps(row | {"response": "x" * 900}) + "\n" for _ in range(9)))
    after = path.stat()
    assert after.st_ino == before.st_ino and after.st_size > before.st_size
    index.refresh()
    assert counted(index, "kind:train") == counted(index, "kind:train reward=0.25 another") == 9
    assert counted(index, "kind:train carry") == 0


def test_what_is_no_readable_file_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    rollouts = folder / "rollouts"
    for name in ("000000.jsonl", "000001.jsonl"):
        (rollouts / name).unlink()
    (rollouts / "000000.jsonl").mkdir()
    os.mkfifo(rollouts / "000001.jsonl")
    (rollouts / "000007.jsonl").symlink_to("/dev/zero")
    index = open_run(folder)
    assert counted(index, "kind:train") == 12
    state = index.state()
    problem = "cannot be read: it is not a regular file"
    assert state.problems == [f"{name}.jsonl {problem}" for name in ("000000", "000001", "000007")]
    assert state.done == state.total
    (rollouts / "000000.jsonl").rmdir()
    (rollouts / "000000.jsonl").write_bytes((rollouts / "000002.jsonl").read_bytes())
    assert index.refresh() == 12 and len(index.state().problems) == 2


def test_batches_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    monkeypatch.setattr(module, "_BATCH_BYTES", 1000)
    index = open_index(RunFolder(folder))
    [file] = [file for file in index.files() if file.kind == "train"]
    added = list(index._read(file, None))
    assert added == [4, 4, 4]  # each line has about 300 bytes


def test_hostile_lines_are_counted_or_kept_as_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    rows = [
        {"group": 0, "index": 1, "prompt": HOSTILE, "response": HOSTILE, "reward": 0.5, "status": "completed"},
        {"group": {"a": 1}, "index": 2**70, "prompt": None, "reward": "much", "status": 7, "messages": 3},
        {"group": 0, "reward": {"score": 0.25, "format": True}, "messages": [{"role": "assistant"}, "x", None]},
        {
            "prompt": [{"content": [{"type": "text", "text": "a picture"}, 5]}, 7],
            "more": json.loads("[" * 300 + "]" * 300),
        },
    ]
    path = folder / "rollouts" / "000001.jsonl"
    deep = b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}\n"
    broken = b'{"a": \n[]\n\xff\xfe\n' + b"[" * 100_000 + b"\n" + deep
    path.write_bytes(broken + "".join(json.dumps(row) + "\n" for row in rows[:1] + rows[2:]).encode())
    index = open_run(folder)
    assert index.state().problems == ["000001.jsonl: 5 lines are no samples in JSON and are left out"]
    found = queries.find(index, read_filter("step=1 kind:train"), limit=9)
    assert [one.scalars["reward"] for one in found] == [0.5, 0.25, None]
    assert found[0].brief()["question"] == HOSTILE[:240]
    cut = found[0].whole(1000)["row"]["response"]
    assert len(cut) < 1100 and "more characters are in the file" in cut
    assert counted(index, '"a picture"') == 1
    assert json.dumps(found[2].whole()).count("[") < 100
    scalars = scalars_of(index.files()[0], rows[1] | {"weight_versions": ["x", "9" * 40]})
    assert scalars[3:5] == (None, None) and scalars[6:8] == (None, None)


def test_a_deleted_file_is_told_where_its_samples_were(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    index = open_run(folder)
    (folder / "rollouts" / "000000.jsonl").unlink()
    [gone] = queries.find(index, read_filter("step=0 kind:train"), limit=1)
    assert "was deleted" in gone.brief()["question"] and gone.whole()["row"] is None and gone.row() is None
    index.refresh()
    assert counted(index, "step=0 kind:train") == 0 and counted(index, "kind:train") == 12
    assert index.state().problems == ["files of samples that were deleted after they were indexed: 1"]
    writer = MetricsWriter(folder)
    add_step(folder, writer, 0)
    writer.close()
    assert index.refresh() == 12 and index.state().problems == []


def test_files_that_are_deleted_while_they_are_read_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH", 5)
    folder = make_run(tmp_path / "run", steps=3)
    index = open_index(RunFolder(folder))

    def delete_after_a_batch() -> bool:
        for step in (0, 1):  # the first one is open, the second one is next
            (folder / "rollouts" / f"00000{step}.jsonl").unlink(missing_ok=True)
        return False

    assert index.refresh(delete_after_a_batch) == 2 * 12 + GROUPS
    assert index.refresh() == 0
    assert counted(index, "kind:train") == counted(index, "step=2 kind:train") == 12
    assert index.state().problems == ["files of samples that were deleted after they were indexed: 1"]


def test_two_processes_may_build_one_index(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    one, other = open_index(RunFolder(folder)), open_index(RunFolder(folder))
    first = iter(one._read(next(iter(one.files())), None))
    next(first)
    other.refresh()
    list(first)
    one.refresh()
    assert counted(one) == counted(other) == 39


def test_a_damaged_index_or_one_of_another_version_is_built_anew(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    index = open_run(folder)
    index.close()
    path = index.path
    assert path is not None
    path.write_bytes(b"no database" * 100)
    path.with_name(path.name + "-journal").write_bytes(b"of a process that was killed")
    assert counted(open_run(folder)) == 15
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    assert counted(open_run(folder)) == 15


def test_an_index_in_use_by_another_process_is_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    index = open_run(folder)
    monkeypatch.setattr(module, "_BUSY_S", 0.01)
    index._db.execute("BEGIN EXCLUSIVE")
    with pytest.raises(DataError, match=r"the index .*\.sqlite is in use by another process"):
        open_index(RunFolder(folder))
    index._db.execute("COMMIT")
    assert counted(index) == counted(open_run(folder)) == 15


def test_an_index_lies_in_a_folder_of_the_users_alone_and_nothing_in_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    mine = tmp_path / "mine"
    mine.write_text("a file of the user's")
    (folder / "index.sqlite").symlink_to(mine)
    cache = tmp_path / "cache" / "slime"
    cache.mkdir(parents=True, mode=0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    before = sorted(folder.rglob("*"))
    index = open_run(folder)
    assert index.path is not None and index.path.parent == cache
    assert (S_IMODE(cache.stat().st_mode), S_IMODE(index.path.stat().st_mode)) == (0o700, 0o600)
    assert sorted(folder.rglob("*")) == before and mine.read_text() == "a file of the user's"
    old = cache / "of_a_run_that_is_gone.sqlite"
    old.touch()
    os.utime(old, (0, 0))
    open_run(folder)
    assert sorted(cache.iterdir()) == [index.path]


def test_a_cache_that_cannot_be_used_is_replaced_by_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(make_run(tmp_path / "run", steps=1))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "slime").symlink_to(tmp_path / "theirs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    index = open_index(folder)
    assert index.path is not None and index.path.parent == tmp_path / "temporary" / f"slime-{os.geteuid()}"
    assert open_index(folder).path == index.path and not list((tmp_path / "theirs").iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(folder.path / "config.toml"))
    with pytest.raises(DataError, match=r"can be written nowhere .* set XDG_CACHE_HOME"):
        open_index(folder)


def test_an_index_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=60)
    index = open_index(RunFolder(folder))
    [(pages,)] = index.query("PRAGMA page_count")
    index.query(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DataError, match=rf"the index {index.path} cannot be written: database or disk is full"):
        index.refresh()


def test_an_index_that_would_fill_the_disk_is_not_continued_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = open_index(RunFolder(make_run(tmp_path / "run", steps=3)))
    state = index.state()
    assert index.path is not None and state.total > 5000
    room = iter([2**30, state.total * 2])  # before the first file, and after it
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=next(room)))
    told = rf"the index {index.path} covers 12 samples and is not continued: about 0 MiB are missing, .* has 0 MiB left"
    with pytest.raises(DataError, match=told):
        index.refresh()
    assert counted(index, "kind:train") == 12 and index.state().done < state.total
    room = iter([2**30] * 9)
    assert index.refresh() == 3 * 12 + GROUPS - 12
    room = iter([5000] * 9)  # little, and there is nothing left to read
    assert index.refresh() == 0


def test_groups_and_the_visits_of_a_prompt_are_found(tmp_path: Path) -> None:
    index = open_run(make_run(tmp_path / "run", steps=4, dropped=[1]))
    members, total = queries.group(index, "000002/7")
    assert total == len(members)
    assert [one.scalars["idx"] for one in members] == [28, 29, 30, 31]
    assert [one.scalars["reward"] for one in members] == [rising(2, 1, n) for n in range(4)]
    assert queries.group(index, "dropped_000001/9001")[0][0].scalars["dropped"] == "all equal"
    assert queries.group(index, "000002/99") == ([], 0) and queries.sample(index, "000002:99") is None
    visited, _ = queries.visits(index, members[0].scalars["prompt"])
    assert [one.scalars["step"] for one in visited] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [4]  # and an evaluation
    assert queries.sample(index, "000002:4") is not None
    best, worst = queries.extreme_groups(index, read_filter("kind:train step=0"), 2)
    assert best == ["000000/0", "000000/1"] and worst == ["000000/2"]


def test_samples_are_sorted_and_paged(tmp_path: Path) -> None:
    index = open_run(make_run(tmp_path / "run", steps=2))
    everything = [one.key for one in queries.find(index, read_filter("kind:train"), sort="-reward", limit=99)]
    pages = [
        one.key
        for offset in range(0, 24, 10)
        for one in queries.find(index, read_filter("kind:train"), sort="-reward", limit=10, offset=offset)
    ]
    assert pages == everything and len(set(pages)) == 24
    with pytest.raises(DataError, match=r"cannot be sorted by 'rewrd'. Did you mean reward\?"):
        queries.find(index, read_filter(""), sort="rewrd")


def test_answers_are_bounded_and_say_what_they_leave_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    row = {"group": 5, "prompt": "p", "response": "x" * 1000, "reward": 1, "failure": "y" * 10_000}
    row |= {"metrics": {str(number): number for number in range(5000)}, "messages": list(range(5000))}
    (folder / "rollouts" / "000001.jsonl").write_text((json.dumps(row) + "\n") * 6)
    index = open_run(folder)
    one = answers.sample_answer(index, "000001:3")["sample"]
    assert len(one["row"]["metrics"]) == len(one["row"]["messages"]) == 1001
    assert one["row"]["messages"][-1] == one["row"]["metrics"]["…"] == "… 4,000 more are in the file"
    assert len(one["failure"]) == 4000
    monkeypatch.setattr(answers, "MAX_BYTES", 3 * len(json.dumps(one)))
    answer = answers.group_answer(index, "000001/5")
    assert len(answer["samples"]) in (2, 3) and answer["left_out"] == 6 - len(answer["samples"])
    assert answers.prompt_answer(index, one["prompt"])["left_out"] == answer["left_out"]
    monkeypatch.setattr(answers, "MAX_BYTES", 1)
    assert answers.group_answer(index, "000001/5")["left_out"] == 5, "one sample is always shown"


@pytest.mark.parametrize("counted", [0, 5, 10_000])
@pytest.mark.parametrize("disorder", [False, True])
@pytest.mark.parametrize("sort", ["step", "-step", "reward", "-tokens"])
def test_words_of_many_samples_find_what_a_list_of_them_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: int, disorder: bool, sort: str
) -> None:
    monkeypatch.setattr(queries, "COUNTED", counted)
    folder = make_run(tmp_path / "run", 5, dropped=[2])
    if disorder:
        write_failed(folder, "judge", [(sample_of(0, 0, 0, 0.0), None)])
    index = RunIndex(RunFolder(folder), None)
    index.refresh()
    assert index.in_order() is not disorder
    line = 'kind:train reward>0 "carry the" -"carry the 3"'
    found = queries.find(index, read_filter(line), sort=sort, limit=7, offset=2)
    everything = [one.scalars for one in queries.find(index, read_filter("kind:train"), limit=1000)]
    texts = {one.key: one.brief()["answer"] for one in queries.find(index, read_filter("kind:train"), limit=1000)}
    kept = [key for key, one in zip(texts, everything, strict=True) if one["reward"] > 0 and "the 3" not in texts[key]]
    assert queries.count(index, read_filter(line)) == len(kept)
    assert len(found) == 7 and {one.key for one in found} <= set(kept)
    column = sort.removeprefix("-")
    values = [one.scalars[column] for one in found]
    assert values == sorted(values, reverse=sort.startswith("-"))


@pytest.mark.parametrize("sort", [sign + column for column in queries.SORTS for sign in ("", "-")])
def test_few_and_many_samples_come_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sort: str
) -> None:
    folder = make_run(tmp_path / "run", 3, dropped=[1])
    unscored = [sample_of(3, 0, n, 0.0, group_index=70, weight_versions=[]) for n in range(3)]
    for sample in unscored:
        sample.reward = None
    write_rollout(folder, 3, [Group(70, unscored)])
    index = RunIndex(RunFolder(folder), None)
    index.refresh()
    for line in ("", "kind:train", "kind:train step>0", "kind:train carry", "-carry", "status:failed"):
        found = []
        for counted in (0, 10_000):
            monkeypatch.setattr(queries, "COUNTED", counted)
            found.append([one.key for one in queries.find(index, read_filter(line), sort=sort)])
        assert found[0] == found[1]
        assert len(found[0]) == queries.count(index, read_filter(line))


def test_counting_for_a_table_stops_behind_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = RunIndex(RunFolder(make_run(tmp_path / "run", 5)), None)
    index.refresh()
    monkeypatch.setattr(queries, "COUNTED", 10)
    totals = {"carry": 11, "kind:train": 11, "kind:train carry": 11, "kind:eval": GROUPS, "kind:eval carry": GROUPS}
    for line, total in totals.items():
        assert queries.table(index, read_filter(line), limit=2)[1] == total
