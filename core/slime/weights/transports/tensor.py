"""Weights as handles of shared memory (CPU) or CUDA IPC, for engines on the trainer's machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from slime.weights.shards import NamedTensors
from slime.weights.transports.beside import RanksBeside
from slime.weights.transports.shared_block import SharedBlock, laid_out
from slime.weights.transports.transport import Fleet, FleetCall, WeightTransport, sync_buckets

#: of a block that stays; more would be used no better by trainer and engine at the same time
_BLOCK_BYTES = 64 * 2**20


@dataclass(kw_only=True, eq=False)
class TensorTransport(WeightTransport):
    """Shares the tensors bucket by bucket inside an update session.

    On a CPU the memory stays from sync to sync, since new pages cost more than copying to them; and there are two
    blocks of it, so that the next bucket is copied to one while the engines load from the other.

    Attributes:
        on_gpu: Whether the weights are on a GPU that the engines share.
        bucket_bytes: Bytes shared at a time; on a CPU 64 MiB at most, unless a tensor is larger.
        beside: The ranks beside the engines, if those are on several nodes.
    """

    on_gpu: bool
    bucket_bytes: int
    beside: RanksBeside | None = None
    _blocks: dict[int, SharedBlock] = field(default_factory=dict, init=False)

    def _update(self, named: NamedTensors, version: str) -> None:
        limit = self.bucket_bytes if self.on_gpu else min(self.bucket_bytes, _BLOCK_BYTES)
        with self._paused(session=True) as fleet:
            loading: FleetCall | None = None
            buckets = sync_buckets(named, limit, self.joined)
            for number, bucket in enumerate(buckets):
                if self.on_gpu and loading is not None:  # one bucket of GPU memory at a time
                    loading.wait(fleet.deadline)
                    self.close()
                index = 0 if self.on_gpu else number % 2
                block = self._block(index, bucket)
                layout = block.fill(bucket)
                if self.beside is None:
                    of_engines = [block.handles(layout, engine.tp_size) for engine in self.engines]
                else:
                    of_engines = self.beside.hand_over(index, block, layout)
                handles = {engine.url: theirs for engine, theirs in zip(self.engines, of_engines, strict=True)}
                if loading is not None:
                    loading.wait(fleet.deadline)
                loading = self._start_loading(fleet, handles, version, flush=self._flushes(number))
            if loading is not None:
                loading.wait(fleet.deadline)
        if self.on_gpu:
            self.close()

    def _start_loading(self, fleet: Fleet, handles: dict[str, list[str]], version: str, *, flush: bool) -> FleetCall:
        timeout_s = fleet.remaining_s()
        return fleet.start(
            "loading shared tensors",
            lambda engine: engine.update_weights(
                "tensor",
                serialized_named_tensors=handles[engine.url],
                selector=self.models,
                version=version,
                flush=flush,
                timeout_s=timeout_s,
            ),
        )

    def _block(self, index: int, bucket: Sequence[tuple[str, Tensor]]) -> SharedBlock:
        """Memory for a bucket; the engines have loaded what was in it."""
        needed = laid_out(bucket)[1]
        block = self._blocks.get(index)
        if block is None or block.size < needed:
            block = None
            self._blocks.pop(index, None)  # before more is taken
            block = self._blocks[index] = SharedBlock(needed, bucket[0][1].device)
        return block

    def close(self) -> None:
        """Free the memory. Engines that still have it mapped keep it until they map another."""
        self._blocks.clear()
