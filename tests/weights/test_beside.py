"""Shared memory for an engine on several nodes: each of its ranks opens that of the trainer's rank beside it.

All of it is on one machine here, where every process could open the memory of every other: which one each engine rank
has open is looked up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from tests.weights.live_engines import assert_serves, transport_to
from tests.weights.megatron_ranks import build, run_ranks
from tests.weights.test_handles import shared_weights
from torch import Tensor

from slime.engine.server import EngineServer
from slime.errors import WeightSyncError
from slime.kit.processes import living_members
from slime.weights.hf_load import load_hf
from slime.weights.shards import NamedTensors, drain, drained, named_hf_tensors
from slime.weights.transports.beside import RanksBeside
from slime.weights.transports.tensor import Layout, SharedBlock, TensorTransport

BUCKET = 100_000

pytestmark = pytest.mark.engine


class Sync:
    """Syncs of one rank of the trainer, which share their memory with one engine of two ranks."""

    def __init__(self, engine: EngineServer, start: Path, scratch: Path) -> None:
        self.models, self.model = build(start, tp=2, padded_vocab=192), read_architecture(start)
        self.beside = RanksBeside([[0, 1]], torch.device("cpu"), 30)
        self.transport: TensorTransport | None = None
        if dist.get_rank() == 0:
            options = {"update_weight_buffer_size": BUCKET, "check_weight_update_equal": True}
            made = transport_to(engine, "tensor", start, scratch, **options)
            assert isinstance(made, TensorTransport)
            made.beside, self.transport = self.beside, made

    def send(self, folder: Path, version: str, named: Callable[[NamedTensors], NamedTensors] = iter) -> str | None:
        """Send a folder's weights; on rank 0, the error."""
        load_hf(self.models, folder, self.model)
        weights = named_hf_tensors(self.models, self.model, bucket_bytes=BUCKET)
        if self.transport is None:
            with self.beside.following():
                drain(weights)
            return None
        try:
            with drained(weights):
                try:
                    self.transport.send(named(weights), version=version)
                finally:
                    self.beside.end()
        except (WeightSyncError, RuntimeError) as error:
            return str(error)
        return None


def test_each_rank_of_an_engine_opens_the_memory_beside_it(
    start_engine: Callable[[int], EngineServer], model_folder: Folders, tmp_path: Path
) -> None:
    engine, start = start_engine(2), model_folder("qwen3", seed=1)
    folders = [model_folder("qwen3", seed=seed) for seed in (2, 3)]

    def rank(index: int) -> Any:
        sync, own = Sync(engine, start, tmp_path), []
        for number, folder in enumerate(folders):
            assert sync.send(folder, f"beside-{number}") is None
            own.append(shared_weights(os.getpid()))
        dist.barrier()
        assert engine.pid is not None
        opened = [shared_weights(pid) for pid in living_members(engine.pid)] if index == 0 else []
        dist.barrier()
        return own, opened

    (first, opened), (second, _) = run_ranks(rank, 2)
    assert first[0] == first[1] and second[0] == second[1], "memory stays from sync to sync"
    assert len(first[0]) == len(second[0]) == 2, "two buckets at most"
    used = [inodes for inodes in opened if inodes]
    assert len(used) == 2 and {frozenset(first[0]), frozenset(second[0])} == {frozenset(one) for one in used}
    assert_serves(engine, folders[1], "beside-1")


def test_a_rank_that_cannot_share_is_named_and_a_sync_that_fails_lets_the_others_go(
    start_engine: Callable[[int], EngineServer], model_folder: Folders, tmp_path: Path
) -> None:
    engine, start, trained = start_engine(2), model_folder("qwen3", seed=1), model_folder("qwen3", seed=2)

    def fault_without_room(_: SharedBlock, __: int, ___: torch.device) -> None:
        raise MemoryError("no room for a bucket")

    def fault_without_files(_: SharedBlock, __: Layout, ___: int) -> list[str]:
        raise MemoryError("no room for another file")

    def broken(named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        for number, one in enumerate(named):
            if number == 20:
                raise RuntimeError("a rank went away")
            yield one

    def rank(index: int) -> Any:
        sync = Sync(engine, start, tmp_path)
        ends = []
        for name, fault in (("__init__", fault_without_room), ("handles", fault_without_files)):
            with pytest.MonkeyPatch.context() as patch:
                if index == 1:
                    patch.setattr(SharedBlock, name, fault)
                ends.append(sync.send(trained, "refused"))
        ends.append(sync.send(trained, "interrupted", broken))
        return [*ends, sync.send(trained, "whole")]

    ends, of_the_other = run_ranks(rank, 2)
    named = "Weight sync: rank 1 of the trainer could not share a bucket: MemoryError: no room for"
    assert ends == [f"{named} a bucket", f"{named} another file", "a rank went away", None]
    assert of_the_other == [None] * 4
    assert_serves(engine, trained, "whole")
