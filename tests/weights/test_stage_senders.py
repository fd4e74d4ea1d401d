"""Pipeline stages that send their own tensors to a live engine, and failures of that."""

from __future__ import annotations

import slime.train  # noqa: F401 - prepares imports of megatron.core

# isort: split

import json
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file
from tests.support.engines import READY_S, cpu_engine
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from tests.weights.live_engines import assert_serves, engine_log_probs, transport_to
from tests.weights.megatron_ranks import build, run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slime.engine.control import EngineControl
from slime.engine.ports import ReservedPort
from slime.engine.server import EngineServer
from slime.errors import CheckpointError, WeightSyncError
from slime.weights.hf_load import load_hf
from slime.weights.hf_save import save_hf, write_part
from slime.weights.shards import NamedTensors, drain, drained, is_first_of_stage, named_hf_tensors
from slime.weights.transports.disk import DiskTransport
from slime.weights.transports.distributed import DistributedTransport
from slime.weights.transports.stages import Turns
from slime.weights.transports.tensor import TensorTransport
from slime.weights.transports.transport import Fleet, WeightTransport, joined_by_engines

BUCKET = 120_000


def gathered(models: Any, folder: Path, *, by_stage: bool = True) -> NamedTensors:
    model = read_architecture(folder)
    return named_hf_tensors(models, model, bucket_bytes=BUCKET // 4, by_stage=by_stage)


def sender(
    engine: EngineServer, folder: Path, scratch: Path, name: str = "distributed", **options: Any
) -> WeightTransport:
    """The transport of this rank, which is the first of its stage."""
    options = {"update_weight_buffer_size": BUCKET, **options}
    transport = transport_to(engine, name, folder, scratch, **options)
    transport.turns = Turns.of_pipeline()
    return transport


def turns_of(transport: WeightTransport) -> Turns:
    assert transport.turns is not None
    return transport.turns


def sync(transport: WeightTransport, named: NamedTensors, version: str) -> str | None:
    """One sync; the first sender's error."""
    try:
        with drained(named), turns_of(transport).sync():
            transport.send(named, version=version)
    except WeightSyncError as error:
        return str(error)
    return None


@pytest.mark.engine
@pytest.mark.row("N7")
@pytest.mark.parametrize(
    ("name", "tp"), [("distributed", 1), ("distributed", 2), ("tensor", 2), ("disk", 2), ("delta", 1)]
)
def test_each_stage_sends_its_own_and_the_engine_computes_as_with_one_sender(
    start_engine: Callable[[int], EngineServer], model_folder: Folders, tmp_path: Path, name: str, tp: int
) -> None:
    engine, start = start_engine(2), model_folder("qwen3", seed=1)
    trained = {seed: model_folder("qwen3", seed=seed) for seed in (2, 3)}

    def rank(index: int) -> Any:
        models = build(start, tp=tp, pp=2, padded_vocab=192)
        found, metrics = [], {}
        several = None
        if is_first_of_stage():
            several = sender(engine, start, tmp_path, name, check_weight_update_equal=True)
        for seed, folder in trained.items():
            load_hf(models, folder, read_architecture(start))
            named = gathered(models, start, by_stage=False)
            if index == 0:
                one = transport_to(engine, "distributed", start, tmp_path, check_weight_update_equal=True)
                one.send(named, version=f"one-{seed}")
                one.close()
                found.append(engine_log_probs(engine))
            else:
                drain(named)
            dist.barrier()
            if several is None:
                drain(gathered(models, start))
            else:
                with turns_of(several).sync():
                    metrics = several.send(gathered(models, start), version=f"stages-{seed}")
            dist.barrier()
            if index == 0:
                found.append(engine_log_probs(engine))
        if several is not None:
            several.close()
        return [(log_probs.tolist(), version) for log_probs, version in found], metrics

    (found, metrics), *others = run_ranks(rank, 2 * tp)
    (one, first), (stages, second), (one_again, _), (stages_again, last) = found
    assert stages == one and stages_again == one_again and one != one_again
    assert (first, second, last) == ("one-2", "stages-2", "stages-3")
    sizes = [metrics[f"perf/sync/stage{stage}_bytes"] for stage in range(2)]
    total = sum(tensor.nbytes for tensor in load_file(trained[3] / "model.safetensors").values())
    assert sum(sizes) == total and min(sizes) > 0.2 * total
    assert metrics["synced_bytes"] == total or name == "delta"
    assert metrics.get("perf/sync/changed_share", 1.0) > 0.9
    assert all(of_other == {} for _, of_other in others)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["tensor", "disk", "delta"])
def test_a_stage_that_fails_is_named_by_every_transport_and_the_repeat_works(
    start_engine: Callable[[int], EngineServer], model_folder: Folders, tmp_path: Path, name: str
) -> None:
    engine, start, trained = start_engine(1), model_folder("qwen3", seed=1), model_folder("qwen3", seed=2)

    def broken(named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        for number, one in enumerate(named):
            if number == 5:
                raise CheckpointError("no space left")
            yield one

    def rank(index: int) -> Any:
        models = build(start, pp=2, padded_vocab=192)
        transport = sender(engine, start, tmp_path, name, check_weight_update_equal=True)
        told: list[Any] = []
        for number, folder in enumerate((start, trained, trained, start, trained)):
            load_hf(models, folder, read_architecture(start))
            dist.barrier()
            weights = gathered(models, start)
            try:
                told.append(sync(transport, broken(weights) if index == 1 == number % 2 else weights, f"new-{number}"))
            except CheckpointError as error:
                told.append(repr(error))
            drain(weights)
        dist.barrier()
        left = sorted(path.name for path in tmp_path.glob(".version-*"))
        dist.barrier()
        transport.close()
        return told, left

    (first, left), (second, _) = run_ranks(rank, 2)
    assert [error is None for error in first] == [True, False, True, False, True]
    assert all("sender of pipeline stage 1 failed: " in first[k] and "no space left" in first[k] for k in (1, 3))
    own = None if name in ("disk", "delta") else "CheckpointError('no space left')"
    assert second == [None, own, None, own, None]
    assert left == []
    assert_serves(engine, trained, "new-4")


def test_stages_write_the_folder_that_one_writer_does(model_folder: Folders, tmp_path: Path) -> None:
    """Tensors and their types, in files that two have written; what is not trained is in `test_stage_folders`."""
    folder = model_folder("qwen3", seed=1)
    model = read_architecture(folder)

    def rank(index: int) -> None:
        models, turns = build(folder, pp=2), Turns.of_pipeline()
        load_hf(models, folder, model)
        made = DiskTransport(engines=[], timeout_s=60, folder=tmp_path, source_folder=folder, model=model, turns=turns)
        with turns.sync():
            made.send(gathered(models, folder), version="stages")
        save = gathered(models, folder, by_stage=False)
        if index == 0:
            save_hf(tmp_path / "one", save, folder, model)
        else:
            drain(save)

    run_ranks(rank, 2)
    stages, one = tmp_path / "version-stages", tmp_path / "one"
    index = json.loads((stages / "model.safetensors.index.json").read_text())
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    files = {name: load_file(stages / name) for name in names}
    assert {key: file for file, held in files.items() for key in held} == index["weight_map"]
    held, expected = {**files[names[0]], **files[names[1]]}, load_file(one / "model.safetensors")
    assert held.keys() == expected.keys()
    assert all(held[key].dtype == expected[key].dtype and held[key].equal(expected[key]) for key in held)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    others = {path.name: path.read_bytes() for path in one.iterdir() if path.suffix != ".safetensors"}
    assert others == {path.name: path.read_bytes() for path in stages.iterdir() if not path.name.startswith("model")}


@pytest.mark.engine
def test_an_engine_and_a_sender_that_fail_are_named_and_the_repeat_works(
    start_engine: Callable[[int], EngineServer], model_folder: Folders, tmp_path: Path
) -> None:
    engine, start, trained = start_engine(1), model_folder("qwen3", seed=1), model_folder("qwen3", seed=2)
    port = ReservedPort()
    dead = EngineControl(f"http://127.0.0.1:{port.number}")
    patch, clock = pytest.MonkeyPatch(), time.monotonic

    def broken(named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        for number, one in enumerate(named):
            if number == 5:
                raise RuntimeError("no memory left")
            yield one

    def slow(named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        for number, one in enumerate(named):
            if number == 5:  # as if it had slept
                patch.setattr(time, "monotonic", lambda: clock() + 1000)
            yield one

    def rank(index: int) -> Any:
        models = build(start, pp=2, padded_vocab=192)
        load_hf(models, trained, read_architecture(start))
        transport = sender(engine, start, tmp_path, repeated=True, weight_sync_timeout_s=60)
        transport.engines = [engine.control, dead]
        told: list[Any] = []
        began = time.time()
        told.append(sync(transport, gathered(models, start), "dead engine"))
        assert time.time() - began < 50  # both: nobody waits for the end of what has failed
        dist.barrier()
        transport.connect([engine.control])
        told.append(sync(transport, gathered(models, start), "whole"))
        for named in (broken, slow):
            dist.barrier()
            weights = gathered(models, start)
            try:
                told.append(sync(transport, named(weights) if index else weights, "partial"))
            except RuntimeError as error:
                told.append(repr(error))
            patch.undo()
            drain(weights)
        dist.barrier()
        told.append(sync(transport, gathered(models, start), "again"))
        transport.close()
        return told

    first, second = run_ranks(rank, 2)
    port.release()
    assert f"pausing failed at engine {dead.url}" in first[0]
    assert first[1] is None and first[4] is None
    assert "sync: the sender of pipeline stage 1 failed: RuntimeError: no memory left" in first[2]
    # It woke up after the end of the sync, and did not send what was old by then.
    late = "no time was left for receiving weights|the broadcast did not finish in time"
    assert re.search(f"the sender of pipeline stage 1 failed: ({late})", first[3])
    assert second == [None, None, "RuntimeError('no memory left')", None, None]
    assert_serves(engine, trained, "again")


@pytest.mark.engine
def test_a_sender_that_dies_in_the_middle_is_named_and_the_engine_can_be_sent_to_again(
    start_engine: Callable[[int], EngineServer], model_folder: Folders, tmp_path: Path
) -> None:
    engine, start, trained = start_engine(1), model_folder("qwen3", seed=1), model_folder("qwen3", seed=2)

    dying, clock = tmp_path / "dying", time.monotonic

    def dies(named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        for number, one in enumerate(named):
            if number == 12:
                dying.touch()
                os._exit(9)
            yield one

    def rank(index: int) -> None:
        models = build(start, pp=2, padded_vocab=192)
        load_hf(models, trained, read_architecture(start))
        transport = sender(engine, start, tmp_path, update_weight_buffer_size=20_000, weight_sync_timeout_s=600)
        named = gathered(models, start)
        with pytest.MonkeyPatch.context() as patch:
            if index == 0:  # the deadline passes when the other has died
                patch.setattr(time, "monotonic", lambda: clock() + 1000 * dying.exists())
            error = sync(transport, dies(named) if index else named, "partial")
        (tmp_path / "error").write_text(str(error))

    with pytest.raises((AssertionError, EOFError)):  # the other rank misses it
        run_ranks(rank, 2)
    error = (tmp_path / "error").read_text()
    assert "the sender of pipeline stage 1 did not send its part in time" in error
    transport = transport_to(engine, "distributed", start, tmp_path)
    transport.send(iter(load_file(trained / "model.safetensors").items()), version="new")
    assert_serves(engine, trained, "new")
    transport.close()


@pytest.mark.engine
def test_an_engine_that_dies_in_the_middle_is_named_and_the_others_get_the_repeat(
    start_engine: Callable[[int], EngineServer],
    model_folder: Folders,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    engine, start, trained = start_engine(1), model_folder("qwen3", seed=1), model_folder("qwen3", seed=2)
    doomed = cpu_engine(start, tmp_path, fork_server=request.getfixturevalue("fork_server"))
    doomed.start()
    doomed.wait_ready(READY_S)

    def rank(index: int) -> Any:
        models = build(start, pp=2, padded_vocab=192)
        load_hf(models, trained, read_architecture(start))
        transport = sender(
            engine, start, tmp_path, update_weight_buffer_size=20_000, repeated=True, weight_sync_timeout_s=120
        )
        transport.engines = [engine.control, doomed.control]

        def kills(named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
            for number, one in enumerate(named):
                if number == 12:
                    os.killpg(doomed.pid, 9)  # type: ignore[arg-type]  # it runs
                yield one

        named = gathered(models, start)
        urls: list[str] = []
        began = time.monotonic()
        with nullcontext() if index else pytest.raises(WeightSyncError) as caught, turns_of(transport).sync():
            transport.send(kills(named) if index else named, version="partial")
        if caught is not None:
            urls = caught.value.urls
        assert time.monotonic() - began < 100
        dist.barrier()
        transport.connect([engine.control])
        assert sync(transport, gathered(models, start), "again") is None
        transport.close()
        return urls

    try:
        urls, _ = run_ranks(rank, 2)
    finally:
        doomed.stop()
    assert urls == [doomed.url]
    assert_serves(engine, trained, "again")


class LiveBytes(TorchDispatchMode):
    """The most bytes at a time of storages that operations have made since this began."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and (key := one.untyped_storage().data_ptr()) not in {*given, *self.live}:
                self.live[key] = one.untyped_storage().nbytes()
                weakref.finalize(one.untyped_storage(), self.live.pop, key, None)
        self.most = max(self.most, sum(self.live.values()))
        return made


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [160, 4096], ids=["vocabulary-fits", "vocabulary-larger"])
@pytest.mark.parametrize("name", ["distributed", "tensor", "disk"])
def test_no_rank_holds_more_than_its_shards_and_two_buckets(
    name: str, vocab: int, model_folder: Folders, tmp_path: Path
) -> None:
    folder, bucket = model_folder("qwen3", seed=1, vocab_size=vocab), 200_000
    names = {name: tensor.nbytes for name, tensor in load_file(folder / "model.safetensors").items()}
    model = read_architecture(folder)

    def broadcast(named: NamedTensors) -> list[str]:
        transport = DistributedTransport(engines=[], timeout_s=1, backend="gloo", bucket_bytes=bucket)
        sent, travelling = list[str](), None
        for described, flat in transport._flattened(named):
            sent += described["names"]
            travelling = flat  # until the next one is there
            del flat
            assert travelling.nbytes <= max(bucket, *(names[name] for name in described["names"]))
        return sent

    def shared(named: NamedTensors) -> list[str]:
        transport = TensorTransport(engines=[], timeout_s=60, on_gpu=False, bucket_bytes=bucket)
        sent = list[str]()

        def listed() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in named:
                sent.append(name)
                yield name, tensor
                del tensor

        transport._send_part(Fleet([], 60), listed(), "1")
        return sent

    def written(named: NamedTensors) -> list[str]:
        stage = parallel_state.get_pipeline_model_parallel_rank()
        parts = write_part(tmp_path, named, folder, model, writer=stage, max_shard_bytes=bucket)
        return [name for tensors in parts.values() for name, _, _ in tensors]

    send = {"distributed": broadcast, "tensor": shared, "disk": written}[name]

    def rank(_: int) -> Any:
        models, sent = build(folder, tp=2, pp=2), list[str]()
        with LiveBytes() as memory:
            named = named_hf_tensors(models, model, bucket_bytes=bucket // 8, by_stage=True)
            if is_first_of_stage():
                sent = send(named)
            else:
                drain(named)
        return memory.most, sent

    answers = run_ranks(rank, 4)
    most = max(held for held, _ in answers)
    largest = max(names.values())
    # Beside a larger tensor: the block that was shared before; the tensors that are not written yet.
    kept = {"tensor": bucket // 2, "disk": bucket}.get(name, 0) if largest > bucket else 0
    assert 0.5 * bucket < most <= 2 * max(bucket, largest) + kept
    assert sorted(name for _, sent in answers for name in sent) == sorted(names)


def test_a_tied_embedding_is_sent_by_the_first_stage_alone(model_folder: Folders) -> None:
    folder = model_folder("qwen3", tied=True)

    def rank(_: int) -> list[str]:
        return [name for name, _ in gathered(build(folder, pp=2), folder)]

    first, second = run_ranks(rank, 2)
    assert "model.embed_tokens.weight" in first and not {*first} & {*second}
    assert {*first, *second} == load_file(folder / "model.safetensors").keys()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "moonlight", "llama"])
def test_what_an_engine_joins_is_of_one_layer(family: str, model_folder: Folders) -> None:
    model = read_architecture(model_folder(family))
    layers: dict[str, set[str]] = {}
    for rule in model.rules:
        prefix = rule.megatron.split(".")[2] if rule.megatron.startswith("decoder.layers.") else rule.megatron
        layers.setdefault(rule.engine, set()).add(prefix)
    assert all(len(of) == 1 for of in layers.values())
    assert all(len({name.split(".")[2] for name in names}) == 1 for names in joined_by_engines(model))
