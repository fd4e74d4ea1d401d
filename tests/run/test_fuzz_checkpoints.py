"""Readers of checkpoints, given thousands of damaged ones: a `CheckpointError`, or a checkpoint that was not damaged.

No engine and no rank is started. Each test says how its files are damaged; together they have 10,000 cases.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.run.test_checkpoint_damage import save

from slime.cli.checkpoint_choice import intact_checkpoint, other_reference, require_continuable
from slime.cli.preflight_plugins import check_resume
from slime.config import config_from_toml
from slime.errors import CheckpointError, ConfigError, PluginError
from slime.registry.plugin_set import load_plugins
from slime.run.checkpoint.files import digest_of_json, read_rollout_part, record_files, write_rollout_part

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

#: nothing is found here twice, so that no time goes to remembering it
FUZZ = settings(
    deadline=None, database=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
#: what plugins.json says about one component
USED = {"reward": {"kind": "reward", "id": "rewards/exact_match", "distribution": "d", "version": "1"}}

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\0", "../..", "/etc/passwd", "\ud800", "rollout_000001"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
#: texts that parsers stumble over
TEXTS = st.sampled_from(
    [
        b"",
        b"\0",
        b"1e999",
        b"-1e999999",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
        b"NaN",
        b"\xff\xfe",
        b"{}",
        b"[]",
    ]
)


class Damage:
    """One folder with a checkpoint, put back before every case."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "saved"
        path = save(self.root, 2)
        write_rollout_part(path / "rollout", {"source": {"at": 3}, "taken": 4, "dropped": {}, "groups": [{"index": 1}]})
        (path / "plugins.json").write_text(json.dumps({"format": 2, "used": USED}))
        self.path = path
        self.names = sorted(one.relative_to(path).as_posix() for one in path.rglob("*") if one.is_file())
        self.sign()
        self.config = config_from_toml((path / "config.toml").read_text())
        self.plugins = load_plugins(self.config.plugins)
        self.contents = {name: (path / name).read_bytes() for name in self.names}

    def put_back(self) -> None:
        for name, content in self.contents.items():
            path = self.path / name
            if path.is_symlink() or not path.is_file():
                path.unlink(missing_ok=True)
            path.write_bytes(content)
        (self.root / "latest").unlink(missing_ok=True)
        (self.root / "latest").write_text("rollout_000002\n")

    def sign(self, **changes: Any) -> None:
        """Let state.json say what the files are now, with `changes`."""
        state = json.loads((self.path / "state.json").read_bytes())
        del state["sha256"]
        state["files"] = record_files(self.path, [self.path / name for name in self.names if name != "state.json"])
        state |= changes
        (self.path / "state.json").write_text(json.dumps({**state, "sha256": digest_of_json(state)}))

    def read(self) -> None:
        """Everything that a command reads of it."""
        with contextlib.suppress(CheckpointError, ConfigError, PluginError):
            checkpoint = intact_checkpoint(self.root, "--load {}")
            read_rollout_part(checkpoint.rollout_part)
            require_continuable(checkpoint, self.config)
            other_reference(checkpoint, self.config)
            check_resume(self.plugins, checkpoint.plugins, self.config)


@pytest.fixture(scope="module")
def damage() -> Iterator[Damage]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        yield Damage(folder)
    finally:
        shutil.rmtree(folder)


@settings(FUZZ, max_examples=3000)
@given(data=st.data())
def test_bytes_are_changed_removed_and_added(damage: Damage, data: st.DataObject) -> None:
    damage.put_back()
    name = data.draw(st.sampled_from([*damage.names, "../latest"]))
    content = bytearray((damage.path / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    (damage.path / name).write_bytes(content)
    if data.draw(st.booleans()) and name not in ("state.json", "../latest"):
        damage.sign()
    damage.read()


@settings(FUZZ, max_examples=3000)
@given(data=st.data())
def test_values_of_json_files_are_replaced(damage: Damage, data: st.DataObject) -> None:
    damage.put_back()
    name = data.draw(st.sampled_from(["state.json", "state.json", "plugins.json", "rollout/state.json"]))
    value = json.loads(damage.contents[name])
    place: Any = value
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    if isinstance(place, dict) and data.draw(st.integers(0, 3)) == 0:
        del place[key]
    else:
        place[key] = data.draw(JSON)
    if name == "state.json":
        rest = {key: one for key, one in value.items() if key != "sha256"}
        value = {**rest, "sha256": digest_of_json(rest)}
    (damage.path / name).write_text(json.dumps(value))
    if name != "state.json":
        damage.sign()
    damage.read()


@settings(FUZZ, max_examples=2000)
@given(data=st.data())
def test_files_are_replaced_by_other_things(damage: Damage, data: st.DataObject) -> None:
    damage.put_back()
    name = data.draw(st.sampled_from([*damage.names, "../latest"]))
    path = damage.path / name
    kind = data.draw(st.sampled_from(["text", "json", "pipe", "loop", "folder", "missing", "link"]))
    if kind == "text":
        path.write_bytes(data.draw(TEXTS))
    elif kind == "json":
        path.write_text(json.dumps(data.draw(JSON)))
    else:
        path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(data.draw(st.sampled_from(["/dev/zero", "/etc/passwd", "nowhere", "."])))
    try:
        if kind in ("text", "json") and name not in ("state.json", "../latest"):
            damage.sign()
        damage.read()
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()


@settings(FUZZ, max_examples=2000)
@given(data=st.data())
def test_tables_of_tensors_are_damaged(metadata: Path, data: st.DataObject) -> None:
    from slime.train.checkpoint_reader import read_metadata, read_tensors

    name = data.draw(st.sampled_from([".metadata", "common.pt"]))
    path = metadata / name
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    damaged = metadata / f"damaged-{name}"
    damaged.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        read_metadata(damaged) if name == ".metadata" else read_tensors(damaged, damaged)


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A table of tensors and a common part, as a rank writes them; and no more memory than they can need."""
    import pickle

    import torch
    from torch.distributed.checkpoint import metadata as formats
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder = tmp_path_factory.mktemp("megatron")
    properties = formats.TensorProperties(dtype=torch.float32)
    chunk = formats.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 2]))
    table: dict[str, Any] = {
        f"layer{i}": formats.TensorStorageMetadata(properties, torch.Size([4, 2]), [chunk]) for i in range(3)
    }
    storage = {formats.MetadataIndex(name): _StorageInfo("__0_0.distcp", 10 * i, 10) for i, name in enumerate(table)}
    whole = formats.Metadata({**table, "extra": formats.BytesStorageMetadata()}, storage_data=storage)
    (folder / "__0_0.distcp").touch()
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    torch.save({"optimizer": {"step": 3}, "random": [{"cpu": torch.get_rng_state()}]}, folder / "common.pt")
    # A pickle can ask for a table of any size.
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * 2**30, hard))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
