"""Shared memory for an engine on several nodes: each of its ranks opens that of the trainer's rank beside it.

All of it is on one machine here, where every process could open the memory of every other: which one each engine rank
has open is looked up.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from tests.weights.live_engines import assert_serves, weights_of
from tests.weights.megatron_ranks import build, run_ranks
from tests.weights.test_handles import shared_weights
from torch import Tensor

from slime.config import read_config
from slime.engine.server import EngineServer
from slime.errors import WeightSyncError
from slime.kit.processes import living_members
from slime.weights.hf_load import load_hf
from slime.weights.shards import NamedTensors, drained, is_first_of_stage, named_hf_tensors
from slime.weights.transports import WeightSender
from slime.weights.transports.beside import RanksBeside
from slime.weights.transports.tensor import Layout, SharedBlock, SharedBlocks

BUCKET = 100_000
#: tensor- and pipeline-parallel ranks of the trainer, and those beside the engine's two ranks. The stages are uneven.
LAYOUTS = {
    "one stage": (2, 1, [0, 1]),
    "two stages": (1, 2, [0, 1]),
    "two stages of two ranks": (2, 2, [1, 2]),
}

pytestmark = pytest.mark.engine


class Sync:
    """Syncs of one rank of the trainer, which share their memory with one engine of two ranks."""

    def __init__(self, engine: EngineServer, start: Path, scratch: Path, layout: str) -> None:
        tp, pp, beside = LAYOUTS[layout]
        self.models, self.model, self._engine = (
            build(start, tp=tp, pp=pp, padded_vocab=192),
            read_architecture(start),
            engine,
        )
        words = (
            f"--pipeline-model-parallel-size {pp} --tensor-model-parallel-size {tp} --actor-num-gpus-per-node {tp * pp}"
        )
        words += f" --update-weight-transport tensor --update-weight-buffer-size {BUCKET} --weight-sync-timeout-s 30"
        words += " --check-weight-update-equal --device cpu --rollout-num-gpus-per-engine 2 --rollout-num-gpus 2"
        config = read_config([*words.split(), "--hf-checkpoint", str(start)])
        self.sender = WeightSender(config, self.model, scratch)
        made = self.sender.ranks_beside([beside], torch.device("cpu"))
        assert made is not None
        self.beside: RanksBeside = made
        self.metrics: dict[str, float] = {}

    def send(self, folder: Path, version: str, named: Callable[[NamedTensors], NamedTensors] = iter) -> str | None:
        """Send a folder's weights, as a rank of the trainer does; the error, if there is one."""
        load_hf(self.models, folder, self.model)
        weights = named_hf_tensors(self.models, self.model, bucket_bytes=self.sender.gathered_bytes, by_stage=True)
        try:
            with self.beside.sync(), drained(weights):  # a generator that raises is at its end, but not the weights
                if is_first_of_stage():
                    self.metrics = self.sender.send(
                        named(weights), [self._engine.url], None, tp_size=2, version=version, restarts=0
                    )
        except (WeightSyncError, RuntimeError) as error:
            return str(error)
        finally:
            dist.barrier()  # the driver starts no other sync before
        return None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_of_an_engine_opens_the_memory_beside_it(
    layout: str, start_engine: Callable[[int], EngineServer], model_folder: Folders, tmp_path: Path
) -> None:
    engine, start = start_engine(2), model_folder("qwen3", seed=1)
    folders = [model_folder("qwen3", seed=seed) for seed in (2, 3)]
    tp, pp, beside = LAYOUTS[layout]

    def rank(_: int) -> Any:
        sync, own = Sync(engine, start, tmp_path, layout), []
        assert engine.pid is not None
        before = {pid: shared_weights(pid) for pid in living_members(engine.pid)}  # of another test's ranks
        for number, folder in enumerate(folders):
            assert sync.send(folder, f"beside-{number}") is None
            own.append(shared_weights(os.getpid()))
        maps = Path("/proc/self/maps").read_text()
        ends = re.findall(r"^(\w+)-(\w+) .*/memfd:slime-weights", maps, re.MULTILINE)
        held = sum(int(end, 16) - int(start, 16) for start, end in ends)
        dist.barrier()
        opened = [shared_weights(pid) - inodes for pid, inodes in before.items()]
        dist.barrier()
        return own, held, opened, sync.metrics

    ranks = run_ranks(rank, tp * pp)
    assert all(first == second for (first, second), *_ in ranks), "memory stays from sync to sync"
    assert all(len(own[0]) == 2 and 0 < held <= BUCKET + 2 * 4096 for own, held, *_ in ranks), "a bucket, in pages"
    _, _, opened, metrics = ranks[0]
    used = [inodes for inodes in opened if inodes]
    assert len(used) == 2 and {frozenset(ranks[one][0][0]) for one in beside} == {frozenset(one) for one in used}
    total = sum(tensor.nbytes for tensor in weights_of(folders[1]).values())
    assert metrics["synced_bytes"] == total
    sizes = [metrics[f"perf/sync/stage{stage}_bytes"] for stage in range(pp) if pp > 1]
    assert pp == 1 or (sum(sizes) == total and min(sizes) > 0.2 * total)
    assert_serves(engine, folders[1], "beside-1")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_cannot_share_and_a_stage_that_fails_are_named_and_the_next_sync_is_right(
    layout: str, start_engine: Callable[[int], EngineServer], model_folder: Folders, tmp_path: Path
) -> None:
    engine, start = start_engine(2), model_folder("qwen3", seed=1)
    trained = model_folder("qwen3", seed=2)
    tp, pp, _ = LAYOUTS[layout]
    last = tp * pp - 1

    def fault_without_room(_: SharedBlock, __: int, ___: torch.device) -> None:
        raise MemoryError("no room for a bucket")

    def fault_without_files(_: SharedBlock, __: Layout, ___: int) -> list[str]:
        raise MemoryError("no room for another file")

    def broken(after: int) -> Callable[[NamedTensors], NamedTensors]:
        def named(weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
            for number, one in enumerate(weights):
                if number == after:
                    raise RuntimeError("a rank went away")
                yield one

        return named

    def rank(index: int) -> Any:
        sync = Sync(engine, start, tmp_path, layout)
        ends = []
        for name, fault in (("__init__", fault_without_room), ("handles", fault_without_files)):
            with pytest.MonkeyPatch.context() as patch:
                if index == last:
                    patch.setattr(SharedBlock, name, fault)
                ends.append(sync.send(trained, "refused"))
        # Before the first bucket of a stage, which the others may be sending before, and in the middle of it.
        for stage in range(pp):
            for after in (1, 12):
                ends.append(sync.send(start, f"interrupted-{stage}", broken(after) if index == stage * tp else iter))
                ends.append(sync.send(trained, f"whole-{stage}"))
        return ends

    ends = run_ranks(rank, tp * pp)
    assert [end[3::2] for end in ends] == [[None] * 2 * pp] * (tp * pp), "what comes after a failure"
    refused = f"Weight sync: rank {last} of the trainer could not share a bucket: MemoryError: no room for"
    assert ends[0][:2] == [f"{refused} a bucket", f"{refused} another file"]
    gone = "a rank went away"
    assert ends[0][2::2] == [gone, gone] + [
        f"Weight sync: the sender of pipeline stage 1 failed: RuntimeError: {gone}" for _ in range(2 * (pp - 1))
    ]
    for index, end in enumerate(ends[1:], 1):
        assert end[:4] == [None] * 4, "the first names them for all"
        assert end[6::2] == [gone if pp == 2 and index == tp else None] * 2 * (pp - 1)
    assert_serves(engine, trained, f"whole-{pp - 1}")


def test_a_source_does_not_wait_longer_than_its_deadline_and_the_next_bucket_arrives() -> None:
    bucket = [("weight", torch.arange(24.0))]

    def rank(index: int) -> Any:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(1, 1)
        beside = RanksBeside([[0, 1]], torch.device("cpu"), 30)
        room = SharedBlocks.room

        def fault_late(*arguments: Any) -> SharedBlock:
            time.sleep(2)
            return room(*arguments)

        ends: list[Any] = []
        for wait_s in (0.2, 25):
            with pytest.MonkeyPatch.context() as patch, beside.sync():
                if index == 1 and not ends:
                    patch.setattr(SharedBlocks, "room", fault_late)
                try:
                    ends.append(beside.hand_over(0, bucket, time.monotonic() + wait_s) if index == 0 else None)
                except WeightSyncError as error:
                    ends.append(str(error))
            dist.barrier()
        held = beside._blocks.room(0, 1, torch.device("cpu")).content().view(torch.float32)[:24].tolist()
        beside.close()
        return ends, held

    (ends, _), (_, held) = run_ranks(rank, 2)
    late, handles = ends
    assert late == (
        "Weight sync: a rank of the trainer did not take its copy of a bucket in time. Look at the ranks' logs;"
        " --weight-sync-timeout-s sets the limit."
    )
    assert [len(of_engine) for of_engine in handles] == [2]
    assert held == bucket[0][1].tolist()
