"""A damaged checkpoint is named with its damaged file, the newest intact one and the option that loads it."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.full_disk import on_a_small_disk

from slime.cli.checkpoint_choice import intact_checkpoint, intact_or_before
from slime.config import load_config
from slime.errors import CheckpointError, disk_problem
from slime.run.checkpoint import files as checkpoint_files
from slime.run.checkpoint.files import Progress, check_content, digest_of_json
from slime.run.checkpoint.read import read_checkpoint
from slime.run.checkpoint.save import CheckpointWriter

pytestmark = pytest.mark.slow

WEIGHTS = bytes(range(256)) * 8


def writer_for(root: Path) -> CheckpointWriter:
    prompts = root.with_name("prompts.jsonl")
    prompts.write_text('{"prompt": "1+1=", "label": "2"}\n')
    flags = ["--num-rollout", "4", "--rollout-batch-size", "2", "--hf-checkpoint", "m", "--loss-type", "sft_loss"]
    return CheckpointWriter(root, load_config([*flags, "--prompt-data", str(prompts), "--lr", "1e-4"]), {"plugins": []})


def commit(writer: CheckpointWriter, temporary: Path, rollouts_done: int) -> Path:
    return writer.commit(temporary, {}, rollouts_done=rollouts_done, weight_version=1, trained_at={1: 0})


def save(root: Path, rollouts_done: int, content: bytes = WEIGHTS) -> Path:
    writer = writer_for(root)
    temporary = writer.begin(rollouts_done)
    (temporary / "megatron" / "__0_0.distcp").write_bytes(content)
    path = commit(writer, temporary, rollouts_done)
    writer.close()
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with checkpoints after 2, 4 and 6 rollouts."""
    for done in (2, 4, 6):
        save(tmp_path / "saved", done)
    return tmp_path / "saved"


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def forge(path: Path, **changes: object) -> None:
    """Change state.json and its own hash, as somebody would who wants it to be read."""
    state = {**json.loads(path.read_text()), **changes}
    del state["sha256"]
    path.write_text(json.dumps({**state, "sha256": digest_of_json(state)}))


#: damage -> (file, what is done to it, what the message says)
DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a flipped bit": (
        "megatron/__0_0.distcp",
        lambda path: edit(path, lambda content: content[:700] + bytes([content[700] ^ 4]) + content[701:]),
        r"megatron/__0_0\.distcp was changed after it was saved \(its sha256 is \w{12}, was \w{12}\)",
    ),
    "truncated": (
        "megatron/__0_0.distcp",
        lambda path: edit(path, lambda content: content[:100]),
        r"megatron/__0_0\.distcp has 100 bytes, and had 2048 when it was saved",
    ),
    "missing": ("megatron/__0_0.distcp", Path.unlink, r"megatron/__0_0\.distcp is missing"),
    "a pipe": ("megatron/__0_0.distcp", fifo, r"megatron/__0_0\.distcp is no plain file"),
    "a link to itself": ("megatron/__0_0.distcp", loop, r"megatron/__0_0\.distcp cannot be read: Too many levels"),
    "edited configuration": (
        "config.toml",
        lambda path: edit(path, lambda content: content.replace(b"0.0001", b"0.0002")),
        r"config\.toml was changed",
    ),
    "edited state": (
        "state.json",
        lambda path: edit(path, lambda content: content.replace(b'"rollouts_done": 6', b'"rollouts_done": 5')),
        r"state\.json is damaged: it was changed after it was saved",
    ),
    "empty state": ("state.json", lambda path: path.write_bytes(b""), r"state\.json is damaged: it is not JSON"),
    "no object": (
        "state.json",
        lambda path: path.write_bytes(b"[]"),
        r"damaged: it holds no JSON object",
    ),
    "deep JSON": ("state.json", lambda path: path.write_bytes(b"[" * 10**6), r"state\.json is damaged"),
    "no text": ("state.json", lambda path: path.write_bytes(b"\xff\xfe\0"), r"state\.json is damaged"),
    "state is a pipe": ("state.json", fifo, r"state\.json is damaged: it is no plain file"),
    "wrong type": (
        "state.json",
        lambda path: forge(path, rollouts_done="six"),
        r"damaged: rollouts_done",
    ),
    "out of range": (
        "state.json",
        lambda path: forge(path, rollouts_done=-1),
        r"damaged: rollouts_done",
    ),
    "a file elsewhere": (
        "state.json",
        lambda path: forge(path, files={**json.loads(path.read_text())["files"], "../x": {"bytes": 1, "sha256": ""}}),
        r"state\.json is damaged: it lists '\.\./x'",
    ),
    "no pairs": (
        "state.json",
        lambda path: forge(path, trained_at=[[1, 0], [2]]),
        r"state\.json is damaged: trained_at",
    ),
    "no pairs at all": ("state.json", lambda path: forge(path, trained_at=[1]), r"state\.json is damaged: trained_at"),
    "no numbers": (
        "state.json",
        lambda path: forge(path, trained_at=[["1", 0]]),
        r"state\.json is damaged: trained_at",
    ),
    "no files": ("state.json", lambda path: forge(path, files={}), r"state\.json is damaged: it does not describe"),
    "a bad data order": (
        "state.json",
        lambda path: forge(path, data_order={"prompt_data": 5}),
        r"state\.json is damaged: data_order\.prompt_data: Input should be a valid list",
    ),
    "plugins are no object": (
        "plugins.json",
        lambda path: path.write_bytes(b"7"),
        r"plugins\.json is damaged: it holds no JSON object",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("named", ["folder", "checkpoint"])
def test_the_damaged_file_and_the_newest_intact_checkpoint_are_named(root: Path, damage: str, named: str) -> None:
    file, harm, message = DAMAGE[damage]
    harm(root / "rollout_000006" / file)
    (root / "rollout_000004" / "megatron" / "__0_0.distcp").unlink()  # so it is not intact either
    advice = rf"The newest intact checkpoint is {root}/rollout_000002: --load {root}/rollout_000002$"
    with pytest.raises(CheckpointError, match=rf"(?s){message}.*{advice}"):
        intact_checkpoint(root if named == "folder" else root / "rollout_000006", "--load {}")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.write_bytes(b"rollout_000099\n"), "latest names rollout_000099, which is not there"),
        (lambda path: path.write_bytes(b"../../etc\n"), r"latest is damaged: got '\.\./\.\./etc'"),
        (lambda path: path.write_bytes(b"\0"), "latest is damaged"),
        (lambda path: path.write_bytes(b""), "latest is damaged: got ''"),
        (fifo, "latest is damaged: it is no plain file"),
        (Path.unlink, "no checkpoint in"),
        (loop, "no checkpoint in"),
    ],
)
def test_a_damaged_pointer_is_named_with_the_newest_intact_checkpoint(
    root: Path, harm: Callable[[Path], object], message: str
) -> None:
    harm(root / "latest")
    with pytest.raises(CheckpointError, match=rf"(?s){message}.*intact checkpoint is {root}/rollout_000006: --load"):
        intact_checkpoint(root, "--load {}")


def test_a_long_comparison_says_how_far_it_is(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    intact_checkpoint(root, "--load {}")
    assert capfd.readouterr().err == "", "a short one says nothing"
    monkeypatch.setattr(checkpoint_files, "TELL_S", 0.0)
    progress = Progress(root, 3 * 2**30)
    progress.count(2**30)
    progress.count(2**29)
    told = capfd.readouterr().err.splitlines()
    assert f"slime: comparing {root} with its hashes: 1.5 of 3.0 GiB" in told


def test_if_none_is_intact_that_is_said(root: Path) -> None:
    for path in root.glob("rollout_*"):
        (path / "config.toml").unlink()
    with pytest.raises(CheckpointError, match=r"config\.toml is missing\. None of the 3 checkpoints in \S+ is intact"):
        intact_checkpoint(root, "--load {}")


def test_a_file_that_was_saved_damaged_is_called_damaged_once(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_bytes(b"[]")
    message = f"checkpoint {tmp_path} is damaged: metadata.json was saved so, or hashed again (ValueError: it holds no"
    with pytest.raises(CheckpointError, match=re.escape(f"{message} JSON object).")):
        check_content(tmp_path, ["metadata.json"], tmp_path / "rollout")


def test_an_intact_checkpoint_lists_every_file_but_its_state(root: Path) -> None:
    checkpoint = intact_checkpoint(root, "--load {}")
    assert checkpoint.path == root / "rollout_000006"
    assert set(checkpoint.files) == {"megatron/__0_0.distcp", "config.toml", "plugins.json"}


# --- continuing before the damaged ones ---------------------------------------------------------------


def test_the_newest_intact_checkpoint_before_the_damaged_ones_is_used(root: Path) -> None:
    (root / "rollout_000006" / "megatron" / "__0_0.distcp").write_bytes(b"")
    (root / "rollout_000004" / "state.json").unlink()
    found, [newest, before, cost] = intact_or_before(root)
    assert (found.place, found.rollouts_done) == (root / "rollout_000002", 2)
    assert newest.startswith("skipped: ") and before.startswith("skipped: ")
    assert "rollout_000006 is damaged: megatron/__0_0.distcp has 0 bytes, and had 2048" in newest
    assert "rollout_000004" in before
    assert cost == f"the run continues from {root}/rollout_000002: 4 rollouts are lost, and are done again"


def test_nothing_is_skipped_where_nothing_is_damaged(root: Path) -> None:
    found, notes = intact_or_before(root / "rollout_000004")
    assert found.rollouts_done == 4 and notes == []


def test_what_lies_behind_the_chosen_checkpoint_is_not_used(root: Path) -> None:
    (root / "rollout_000004" / "config.toml").unlink()
    found, notes = intact_or_before(root / "rollout_000004")
    assert found.place.name == "rollout_000002" and "2 rollouts are lost" in notes[-1]


@pytest.mark.parametrize("pointer", [b"", b"rollout_000099\n", None])
def test_with_a_damaged_pointer_the_newest_of_all_is_used(root: Path, pointer: bytes | None) -> None:
    if pointer is None:
        (root / "latest").unlink()
    else:
        (root / "latest").write_bytes(pointer)
    found, [problem, cost] = intact_or_before(root)
    assert found.place.name == "rollout_000006"
    assert ("93 rollouts are lost" if pointer == b"rollout_000099\n" else "no rollout is lost") in cost
    assert str(root) in problem


def test_if_all_are_damaged_the_newest_is_named(root: Path) -> None:
    for path in root.glob("rollout_*"):
        (path / "config.toml").write_text("")
    with pytest.raises(
        CheckpointError, match=r"rollout_000006 is damaged: config\.toml .* None of the 3 checkpoints in"
    ):
        intact_or_before(root)


# --- a run that is killed while it saves --------------------------------------------------------------


def die_before(call: int, *changes: tuple[Any, str]) -> None:
    """Let this process die before the `call`-th call of these functions, each given as (owner, name), in any thread."""
    calls, lock = 0, threading.Lock()

    def counted(change: Callable[..., object]) -> Callable[..., object]:
        def made(*arguments: object, **options: object) -> object:
            nonlocal calls
            with lock:
                calls += 1
                if calls == call:
                    os.kill(os.getpid(), signal.SIGKILL)
            return change(*arguments, **options)

        return made

    for owner, name in changes:
        setattr(owner, name, counted(getattr(owner, name)))


def save_and_die(root: Path, call: int) -> None:
    """Save over the checkpoint after 6 rollouts and die before the `call`-th change of the folder's names."""
    die_before(call, (Path, "rename"), (Path, "replace"), (shutil, "rmtree"))
    save(root, 6, WEIGHTS[::-1])


@pytest.mark.parametrize("call", range(1, 8))
def test_a_run_killed_at_any_moment_leaves_a_checkpoint_that_loads(root: Path, call: int) -> None:
    process = multiprocessing.get_context("fork").Process(target=save_and_die, args=(root, call))
    process.start()
    process.join(240)
    assert process.exitcode in (0, -signal.SIGKILL)
    if call <= 3:
        assert process.exitcode == -signal.SIGKILL, "the run ended before: nothing was tested"
    for place in (max(1, call - 1), call):  # later runs are killed one step earlier, and there
        assert intact_checkpoint(root, "--load {}").rollouts_done == 6
        assert intact_checkpoint(root / "rollout_000006", "--load {}").rollouts_done == 6
        process = multiprocessing.get_context("fork").Process(target=save_and_die, args=(root, place))
        process.start()
        process.join(240)
    assert intact_checkpoint(root, "--load {}").rollouts_done == 6
    save(root, 6, WEIGHTS * 2)
    checkpoint = read_checkpoint(root)
    assert (checkpoint.trainer_part / "__0_0.distcp").read_bytes() == WEIGHTS * 2
    assert not list(root.glob(".*"))


# --- a full disk ----------------------------------------------------------------------------------------


def test_a_full_disk_is_named_with_its_free_bytes_and_the_newest_checkpoint_stays(root: Path) -> None:
    writer = writer_for(root)
    temporary = writer.begin(8)
    message = on_a_small_disk(commit, writer, temporary, 8, file_bytes=300)
    assert message is not None
    assert re.search(r"checkpoint \S+/rollout_000008 could not be written: .*; [\d,]+ bytes are free in", message)
    writer.discard(temporary)
    assert intact_checkpoint(root, "--load {}").rollouts_done == 6
    assert not list(root.glob(".*"))
    save(root, 8)  # and there is space again
    assert intact_checkpoint(root, "--load {}").rollouts_done == 8


def test_a_library_that_says_nothing_of_the_full_disk_is_not_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    assert disk_problem(error, tmp_path / "megatron").startswith("RuntimeError: [enforce fail")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert disk_problem(error, tmp_path / "megatron") == f"the disk is full; 0 bytes are free in {tmp_path}"
    refused = PermissionError(errno.EACCES, "Permission denied")
    assert disk_problem(refused, tmp_path / "megatron").startswith("Permission denied; ")
