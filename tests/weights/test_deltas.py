"""Versions of weights as deltas on a disk: nothing that happens to their files gives an engine wrong weights."""

from __future__ import annotations

import os
import random
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from slime.engine.control import EngineControl
from slime.errors import CheckpointError, WeightSyncError
from slime.weights import deltas
from slime.weights.deltas import MANIFEST, Manifest, pack, unpack
from slime.weights.local_copy import LocalCopy
from slime.weights.transports import delta
from slime.weights.transports.delta import DeltaTransport
from slime.weights.transports.stages import Turns


class FakeEngine(EngineControl):
    """Answers every call with yes, and remembers which model folders it loaded."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.loaded: list[str] = []

    def _call(self, _: Any, path: str, body: Any = None, **__: Any) -> dict[str, Any]:
        if path == "/update_weights_from_disk":
            self.loaded.append(body["model_path"])
        return {}


Receive = Callable[[str, Path, str, float], Path]


def sender(folder: Path, versions: Path, urls: Sequence[str], receive: Receive, full_every: int = 5) -> DeltaTransport:
    return DeltaTransport(
        engines=[FakeEngine(url) for url in urls],
        timeout_s=60.0,
        folder=versions,
        source_folder=folder,
        model=read_architecture(folder),
        full_every=full_every,
        receive=receive,
    )


class Senders:
    """The transports of pipeline stages, each with its part of the tensors."""

    def __init__(self, count: int, make: Callable[[], DeltaTransport]) -> None:
        store = HashStore()
        self.of_stages = [make() for _ in range(count)]
        for stage, transport in enumerate(self.of_stages):
            transport.turns = Turns(store, stage, count) if count > 1 else None

    def send(
        self,
        weights: dict[str, Tensor],
        version: str,
        wrong: Callable[[int, Iterator[Any]], Iterator[Any]] | None = None,
    ) -> dict[str, float]:
        """A sync of all senders; `wrong` may change what one of them is given."""
        names, count = sorted(weights), len(self.of_stages)

        def part(stage: int) -> dict[str, float]:
            transport = self.of_stages[stage]
            named = ((name, weights[name]) for name in names[stage::count])
            metrics: dict[str, float] = {}
            with nullcontext() if transport.turns is None else transport.turns.sync():
                metrics = transport.send(named if wrong is None else wrong(stage, named), version=version)
            return metrics

        with ThreadPoolExecutor(count) as pool:
            others = [pool.submit(part, stage) for stage in range(1, count)]
            try:
                return part(0)
            finally:
                for other in others:
                    other.result()


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in model_files(folder) for name, tensor in load_file(file).items()}


def model_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def step(weights: dict[str, Tensor], rng: random.Random) -> dict[str, Tensor]:
    """The weights after some numbers of some tensors have changed."""
    after = {name: tensor.clone() for name, tensor in weights.items()}
    for name in rng.sample(sorted(after), k=rng.randint(0, 4)):
        flat = after[name].reshape(-1)
        flat[[rng.randrange(len(flat)) for _ in range(rng.choice([1, 7]))]] += rng.gauss(0, 1)
    return after


def assert_holds(model: Path, expected: dict[str, Tensor]) -> None:
    held = weights_of(model)
    assert held.keys() == expected.keys()
    wrong = [name for name in held if not torch.equal(held[name].view(torch.uint8), expected[name].view(torch.uint8))]
    assert not wrong


@pytest.mark.slow
@pytest.mark.row("N7")
@pytest.mark.parametrize("stages", [1, 2], ids=["one-packer", "two-packers"])
def test_lost_torn_repeated_and_reordered_files_never_give_wrong_weights(
    stages: int, model_folder: Folders, tmp_path: Path
) -> None:
    folder, rng, lock = model_folder("qwen3", seed=1), random.Random(7), threading.Lock()
    versions, weights = tmp_path / "versions", weights_of(folder)
    urls = [f"http://127.0.0.1:{port}" for port in (1, 2, 3)]
    copies = {url: LocalCopy(tmp_path / f"copy-{index}") for index, url in enumerate(urls)}
    #: name of a version -> what it holds
    true: dict[str, dict[str, Tensor]] = {}
    faults = {"lost": 0, "torn": 0, "flipped": 0, "repeated": 0, "reordered": 0, "copy lost": 0, "copy torn": 0}
    refused = failed = 0

    def fails(stage: int, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        nonlocal failed
        for number, one in enumerate(named):
            if (stage, number) == place:
                failed += 1
                raise CheckpointError(f"stage {stage} has no memory left")
            yield one

    def harm(kind: str, copy: LocalCopy) -> None:
        faults[kind] += 1
        versions_there = sorted(versions.glob("version-*"))
        one = rng.choice(versions_there)
        files = sorted(path for path in one.iterdir() if path.suffix in (".safetensors", ".json"))
        match kind:
            case "lost":
                victim = rng.choice([one, *files])
                shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
            case "torn" if files:
                victim = rng.choice(files)
                os.truncate(victim, rng.randrange(victim.stat().st_size + 1))
            case "flipped" if files:
                flip(rng.choice(files), rng)
            case "reordered":
                try:
                    copy.apply(one)
                except CheckpointError:
                    return
                assert_holds(copy.model, true[one.name])
            case "copy lost":
                shutil.rmtree(copy.model, ignore_errors=True)
            case "copy torn" if copy.model.is_dir():
                flip(rng.choice(model_files(copy.model)), rng)

    def receive(url: str, folder: Path, name: str, _: float) -> Path:
        nonlocal refused
        with lock:
            true.setdefault(name, weights)
            copy = copies[url]
            kind = rng.choice([*faults, *[""] * 12])
            if kind and kind != "repeated":
                harm(kind, copy)
            try:
                for _again in range(2 if kind == "repeated" else 1):
                    faults["repeated"] += _again
                    model = copy.bring_to(folder, name)
                    assert_holds(model, true[name])
            except CheckpointError:
                refused += 1
                raise
            return model

    senders = Senders(stages, lambda: sender(folder, versions, urls, receive))
    transport, arrived = senders.of_stages[0], 0
    for number in range(100 if stages == 1 else 140):
        weights = step(weights, rng)
        #: stage and number of the tensor at which its sender fails
        place = (rng.randrange(2), rng.randrange(12)) if stages > 1 and rng.random() < 0.15 else (-1, -1)
        transport.connect([FakeEngine(url) for url in rng.sample(urls, k=rng.randint(1, 3))])
        before = failed
        try:
            senders.send(weights, str(number), fails)
        except WeightSyncError as error:
            failure = r"stage \d has no memory left" if failed > before else "applying the new version to the copy"
            assert re.search(failure, str(error))
            continue
        assert failed == before
        arrived += 1
        for engine in transport.engines:
            assert isinstance(engine, FakeEngine)
            assert_holds(Path(engine.loaded[-1]), weights)
    assert min(faults.values()) >= 3, faults
    assert refused >= 5
    assert arrived >= 50
    assert failed >= 10 * (stages - 1)
    for one in senders.of_stages[::-1]:
        one.close()
    assert not list(versions.iterdir())


def test_a_packer_that_fails_is_named_and_the_next_version_is_whole(model_folder: Folders, tmp_path: Path) -> None:
    folder, copy, rng = model_folder("qwen3", seed=1), LocalCopy(tmp_path / "copy"), random.Random(3)
    weights, versions = weights_of(folder), tmp_path / "v"
    senders = Senders(
        2, lambda: sender(folder, versions, ["http://127.0.0.1:1"], lambda _, at, name, __: copy.bring_to(at, name))
    )

    def first_alone(stage: int, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for number, one in enumerate(named):
            if stage == 1 and number == 3:
                raise CheckpointError("no memory left")
            yield one

    def loses_one(stage: int, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        if stage == 1:
            next(named)
        yield from named

    def twice(stage: int, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        yield from named
        if stage == 1:
            yield min(weights), weights[min(weights)]

    assert senders.send(weights, "1")["perf/sync/changed_share"] == 1.0
    for number, (wrong, told) in enumerate(
        (
            (first_alone, "sender of pipeline stage 1 failed: saving failed: no memory left"),
            (loses_one, r"sender of pipeline stage 1 failed: saving failed: .* was not written: .*missing \[[a-z]"),
            (twice, "sender of pipeline stage 1 failed: saving failed: .* has another shape or type"),
        )
    ):
        weights = step(weights, rng)
        assert senders.send(weights, f"delta-{number}")["perf/sync/changed_share"] < 1.0
        assert_holds(copy.model, weights)
        weights = step(weights, rng)
        with pytest.raises(WeightSyncError, match=told):
            senders.send(weights, "failed", wrong)
        if wrong is twice:  # of a whole version, it is seen when all have reported
            with pytest.raises(WeightSyncError, match=f"twice .{min(weights)}"):
                senders.send(weights, "failed", wrong)
        assert senders.send(weights, f"whole-{number}")["perf/sync/changed_share"] == 1.0
        assert_holds(copy.model, weights)
    newest = Manifest.read(max(versions.glob("version-*")))
    assert newest.base is None and newest.tensors.keys() == weights.keys()


def flip(path: Path, rng: random.Random) -> None:
    """Another byte somewhere; a real change keeps the time of the file no more than this one."""
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        path.write_bytes(data)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_what_is_packed_is_unpacked_bit_for_bit(itemsize: int) -> None:
    rng = np.random.default_rng(itemsize)
    old = rng.integers(0, 256, 1000 * itemsize, dtype=np.uint8)
    new = old.copy()
    new[::17] = 255 - new[::17]
    packed = pack(old, new, itemsize)
    assert np.array_equal(unpack(old, packed, itemsize), new)
    assert len(packed) < new.size


def test_a_tensor_of_several_pieces_is_sent_by_the_pieces_that_changed(
    model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltas, "PIECE", 4096)
    monkeypatch.setattr(deltas, "_FILE_BYTES", 1)
    folder = model_folder("qwen3", seed=1)
    copy, weights = LocalCopy(tmp_path / "copy"), weights_of(folder)
    transport = sender(
        folder, tmp_path / "v", ["http://127.0.0.1:1"], lambda _, where, name, __: copy.bring_to(where, name)
    )
    assert transport.send(iter(weights.items()), version="1")["perf/sync/changed_share"] == 1.0
    name = max(weights, key=lambda one: weights[one].nbytes)
    weights[name] = weights[name].clone()
    flat = weights[name].view(-1)
    flat[0] += 1
    flat[-1] += 1
    metrics = transport.send(iter(weights.items()), version="2")
    assert metrics["perf/sync/changed_share"] == pytest.approx(2 / sum(one.numel() for one in weights.values()))
    newest = Manifest.read(max((tmp_path / "v").glob("version-*")))
    last = -(-weights[name].nbytes // 4096) - 1
    assert newest.changed == {name: {"0": "changed-00001.safetensors", str(last): "changed-00002.safetensors"}}
    transport.send(iter(weights.items()), version="3")  # the same again
    newest_folder = max((tmp_path / "v").glob("version-*"))
    assert Manifest.read(newest_folder).changed == {} and not list(newest_folder.glob("changed-*"))
    assert_holds(copy.model, weights)


def test_old_versions_go_once_a_whole_one_is_loaded_and_a_late_engine_needs_no_other(
    model_folder: Folders, tmp_path: Path
) -> None:
    folder, rng = model_folder("qwen3", seed=1), random.Random(1)
    weights, kept = weights_of(folder), []
    first, late = LocalCopy(tmp_path / "first"), LocalCopy(tmp_path / "late")
    at = {"http://127.0.0.1:1": first, "http://127.0.0.1:2": late}
    versions = tmp_path / "v"
    (versions / ".version-000000-killed").mkdir(parents=True)
    transport = sender(folder, versions, list(at)[:1], lambda url, where, name, _: at[url].bring_to(where, name), 3)
    for number in range(8):
        weights = step(weights, rng)
        if number == 7:
            transport.connect([FakeEngine(url) for url in at])
        transport.send(iter(weights.items()), version=str(number))
        kept.append([Manifest.read(path).base is None for path in sorted(versions.iterdir())])
    assert kept == [[True], [True, False], [True, False, False]] * 2 + [[True], [True, False]]
    assert_holds(first.model, weights)
    assert_holds(late.model, weights)


def test_what_the_version_before_held_is_freed_before_a_whole_one_is_written(
    model_folder: Folders, tmp_path: Path
) -> None:
    folder, copy = model_folder("qwen3", seed=1), LocalCopy(tmp_path / "copy")
    weights = weights_of(folder)
    transport = sender(
        folder, tmp_path / "v", ["http://127.0.0.1:1"], lambda _, at, name, __: copy.bring_to(at, name), full_every=1
    )
    transport.send(iter(weights.items()), version="1")
    assert transport._newest is not None
    before = weakref.ref(transport._newest)
    kept = []

    def given() -> Iterator[tuple[str, Tensor]]:
        for one in weights.items():
            kept.append(before() is not None)
            yield one

    transport.send(given(), version="2")
    assert kept == [False] * len(weights)


def test_a_delta_that_does_not_follow_is_refused_with_both_versions(model_folder: Folders, tmp_path: Path) -> None:
    folder, copy = model_folder("qwen3", seed=1), LocalCopy(tmp_path / "copy")
    weights, rng = weights_of(folder), random.Random(3)
    transport = sender(folder, tmp_path / "v", [], lambda *_: tmp_path)
    for number in range(3):
        weights = step(weights, rng)
        transport.send(iter(weights.items()), version=str(number))
    whole, middle, last = sorted((tmp_path / "v").iterdir())
    with pytest.raises(CheckpointError, match=rf"{last.name} changes version {middle.name}, and the copy .* no whole"):
        copy.apply(last)
    copy.apply(whole)
    with pytest.raises(
        CheckpointError, match=rf"changes version {middle.name}, and the copy .* is version {whole.name}"
    ):
        copy.apply(last)
    assert copy.held() == whole.name
    shutil.rmtree(middle)
    with pytest.raises(CheckpointError, match=rf"{last.name} builds on {middle.name}, which is gone: .*{MANIFEST}"):
        copy.bring_to(tmp_path / "v", last.name)
    shutil.rmtree(last)
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/v/{last.name}/{MANIFEST}"):
        copy.bring_to(tmp_path / "v", last.name)
    assert copy.held() == whole.name


def test_a_full_disk_while_a_version_is_written_is_named_and_the_next_version_is_whole(
    model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, copy = model_folder("qwen3", seed=1), LocalCopy(tmp_path / "copy")
    weights, rng = weights_of(folder), random.Random(3)
    transport = sender(
        folder, tmp_path / "v", ["http://127.0.0.1:1"], lambda _, where, name, __: copy.bring_to(where, name)
    )
    transport.send(iter(weights.items()), version="1")

    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as broken:
        broken.setattr(delta.DeltaFiles, "flush", full)
        gathered = iter(step(weights, rng).items())
        with pytest.raises(WeightSyncError, match=r"saving failed: .*disk is full; [\d,]+ bytes are free in"):
            transport.send(gathered, version="2")
    assert len(list((tmp_path / "v").iterdir())) == 1  # nothing half written
    assert_holds(copy.model, weights)
    weights = step(weights, rng)
    assert transport.send(iter(weights.items()), version="3")["perf/sync/changed_share"] == 1.0
    assert_holds(copy.model, weights)


def test_a_copy_that_cannot_be_written_says_where_it_is(model_folder: Folders, tmp_path: Path) -> None:
    folder = model_folder("qwen3", seed=1)
    (tmp_path / "file").write_text("")
    copy = LocalCopy(tmp_path / "file" / "copy")
    transport = sender(
        folder, tmp_path / "v", ["http://127.0.0.1:1"], lambda _, where, name, __: copy.bring_to(where, name)
    )
    with pytest.raises(WeightSyncError, match=r"copy of the weights in .*/file/copy cannot be written: .*TMPDIR"):
        transport.send(iter(weights_of(folder).items()), version="1")


def test_missing_tensors_are_refused_and_the_next_version_is_whole(model_folder: Folders, tmp_path: Path) -> None:
    folder = model_folder("qwen3", seed=1)
    weights = weights_of(folder)
    transport = sender(folder, tmp_path / "v", [], lambda *_: tmp_path)
    transport.send(iter(weights.items()), version="1")
    with pytest.raises(WeightSyncError, match="was not written: the trainer gave 1 tensors"):
        transport.send(iter(list(weights.items())[:1]), version="2")
    assert len(list((tmp_path / "v").iterdir())) == 1
    assert transport.send(iter(weights.items()), version="3")["perf/sync/changed_share"] == 1.0
